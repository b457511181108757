"""What telemetry's figures are compared with: an observer that dumps what passes, and NumPy.

Each element counts once. Which rank counts what is told by the bytes: what several ranks hold alike at the same event
is a replica, everything else is a part.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.support.ranks import Layout, model_parallel

SMALL: dict[str, Any] = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4}
RUN: dict[str, Any] = {"sequence": 64, "micro_batch": 1, "global_batch": 2, "vocab": 128}


@dataclass
class Piece:
    """A matrix that one rank saw, what its codes stand for, the largest that its codes can hold, and their scales."""

    x: np.ndarray
    meant: np.ndarray | None = None
    largest: np.ndarray | None = None
    scales: np.ndarray | None = None


class Dump:
    """An observer that passes everything on to another one and keeps copies of what counts."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.seen: dict[tuple[str, str], list[Piece]] = defaultdict(list)
        self._weights: set[str] = set()

    def wants(self, iteration):
        return self.inner.wants(iteration)

    def cast(self, seen):
        site, _, role = seen.slot.rpartition(".")
        if seen.recorded and not (role == "weight" and site in self._weights):
            self._weights |= {site} if role == "weight" else set()
            side, x = seen.done.tensor.rowwise, seen.x
            scale = side.expanded_scale_inv().expand(x.shape)
            self.seen[site, role].append(
                Piece(
                    _numbers(x),
                    _numbers(side.codes.to(torch.float32)).astype(np.float64) * _numbers(scale),
                    side.fmt.max * _numbers(scale).astype(np.float64),
                    _numbers(side.float_scale_inv()).reshape(-1),
                )
            )
        self.inner.cast(seen)

    def stored(self, slot, weight):
        """The masters that this rank has, rounded as they were cast, and their codes."""
        site, _, role = slot.rpartition(".")
        start, stop = weight.piece or (0, weight.numel())
        if start < stop:
            side, x = weight.quantized.rowwise, _numbers(weight.main_param.to(weight.dtype)).reshape(-1)
            scale = _numbers(side.expanded_scale_inv().expand(weight.shape)).reshape(-1)[start:stop]
            meant = _numbers(side.codes.to(torch.float32)).reshape(-1)[start:stop].astype(np.float64) * scale
            assert (abs(meant - x) <= abs(x) / 16 + scale / 512).all(), "these codes are not this master's"
            largest = side.fmt.max * scale.astype(np.float64)
            self.seen[site, role].append(Piece(x, meant, largest, scale))
        self.inner.stored(slot, weight)

    def product(self, seen):
        if seen.recorded:
            tensor = {"fprop": "output"}.get(seen.gemm, seen.gemm)
            self.seen[seen.site, tensor].append(Piece(_numbers(seen.y)))
        self.inner.product(seen)

    def high_precision(self, seen):
        self.inner.high_precision(seen)

    def ended(self, iteration):
        self.inner.ended(iteration)


def _numbers(x: torch.Tensor) -> np.ndarray:
    return x.detach().to(torch.float32).numpy().copy()


def once(ranks: list[list[Piece]]) -> list[Piece]:
    """The pieces of all ranks, event by event, without replicas."""
    found = []
    for event in range(max(map(len, ranks))):
        here = [pieces[event] for pieces in ranks if event < len(pieces)]
        found += list(
            {piece.x.tobytes() + bytes(str(piece.x.shape), "ascii"): piece for piece in here}.values()
        )
    return found


def reference(pieces: list[Piece]) -> dict[str, float]:
    """The statistics of all pieces' values together, and of their codes where there are some."""
    x = np.concatenate([piece.x.reshape(-1) for piece in pieces]).astype(np.float64)
    magnitude = np.abs(x)
    centred = x - x.mean()
    found = {
        "min": x.min(),
        "max": x.max(),
        "mean": x.mean(),
        "std": x.std(ddof=1),
        "l1_norm": magnitude.sum(),
        "l2_norm": np.sqrt((x * x).sum()),
        "cur_amax": magnitude.max(),
        "dynamic_range": np.log2(magnitude.max()) - np.log2(magnitude[magnitude > 0].min()),
        "kurtosis": (centred**4).mean() / (centred**2).mean() ** 2,
        "nonfinite": 0.0,
    }
    if pieces[0].meant is None:
        return found
    meant = np.concatenate([piece.meant.reshape(-1) for piece in pieces])
    largest = np.concatenate([piece.largest.reshape(-1) for piece in pieces])
    scales = np.concatenate([piece.scales for piece in pieces])
    error = ((meant - x) ** 2).sum()
    return found | {
        "underflows%": 100 * ((x != 0) & (meant == 0)).sum() / x.size,
        "overflows%": 100 * (magnitude > largest * (1 + 2**-21)).sum() / x.size,
        "scale_inv_min": scales.min(),
        "scale_inv_max": scales.max(),
        "mse": error / x.size,
        "sqnr_db": 10 * np.log10((x * x).sum() / error),
    }


EXACT = {
    "min", "max", "cur_amax", "dynamic_range", "nonfinite", "underflows%", "overflows%", "scale_inv_min",
    "scale_inv_max",
}  # fmt: skip
"""Extremes, and what follows from counts."""


def differences(record: dict[str, Any], wanted: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Statistics of a record that are not as they should be: (found, wanted)."""
    found = {}
    for name, value in wanted.items():
        exact = record[name] == value if name in EXACT else abs(record[name] - value) <= 1e-6 * abs(value)
        # A mean is a sum that cancels: its error is one of the magnitudes'.
        close = name == "mean" and abs(record[name] - value) <= 1e-9 * wanted["cur_amax"]
        if not (exact or close):
            found[name] = (record[name], value)
    return found


def trained(
    layout: Layout,
    recipe: str | None,
    fields: dict[str, Any] | None = None,
    *,
    ddp: dict[str, Any] | None = None,
    steps: int = 1,
    validate: bool = False,
    run: dict[str, Any] | None = None,
    **telemetry: Any,
) -> tuple[list[dict[str, Any]], dict[tuple[str, str], list[Piece]]]:
    """A rank case: trains the small GPT; the records of the last measured iteration, and what passed in the last."""
    from megatron_fp8.telemetry import Telemetry
    from tests.support.resume import Training

    with model_parallel(layout):
        training = Training(
            layout, recipe, {**SMALL, **(fields or {})}, ddp or {}, seed=7, **{**RUN, **(run or {})}
        )
        with Telemetry(training.chunks, **telemetry) as measured:
            training.steps(steps - 1)
            if validate:
                _validate(training)
            (state,) = measured.states
            collector = state.watcher
            state.watch(None)
            state.watch(dump := Dump(collector))
            training.steps(1)
            return measured.records, dict(dump.seen)


def losses(layout: Layout, recipe: str, **telemetry: Any) -> Any:
    """A rank case: losses, gradient norms and all that training continues from, of two iterations."""
    from megatron_fp8.telemetry import Telemetry
    from tests.support.resume import Training

    with model_parallel(layout):
        training = Training(layout, recipe, SMALL, {}, seed=7, **RUN)
        with Telemetry(training.chunks, **telemetry):
            return training.steps(2), training.digests()


def _validate(training: Any) -> None:
    from benchmarks.support.gpt import train_step

    with torch.no_grad():
        train_step(
            training.config, training.chunks, training.optimizer, 99, **training.options, forward_only=True
        )


def merged(results: list[Any]) -> dict[tuple[str, str], list[Piece]]:
    """What all ranks saw, each element once."""
    keys = dict.fromkeys(key for _, seen in results for key in seen)
    return {key: once([seen[key] for _, seen in results if key in seen]) for key in keys}


def counted(layout: Layout, recipe: str) -> list[list[tuple[str, str]]]:
    """A rank case: the collectives of an iteration without telemetry, of one that is measured, of one that is not."""
    from megatron_fp8.telemetry import Telemetry
    from tests.support.collectives import recorded
    from tests.support.resume import Training

    with model_parallel(layout):
        training = Training(layout, recipe, SMALL, {}, seed=7, **RUN)
        training.steps(1)
        found = []
        for every in (0, 1, 100):
            with Telemetry(training.chunks, every=every) as telemetry, recorded() as log:
                training.steps(1)
            assert bool(telemetry.records) == (every == 1)
            found.append(sorted((sent.name, str(sent.dtype).removeprefix("torch.")) for sent in log.sent))
        return found
