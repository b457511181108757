"""Log-probabilities of training and of an engine on given tokens, and their difference by cause.

The causes are switched on one after the other, from training's computation to the engine's. A part is what its step adds
to the difference from training, so the parts add up to the whole:

    config           fields of config.json, and the vocabulary without its padding
    order of sums    both operands of each linear decoded, and summed in float32
    rounding         values between the linears, rounded where the engine rounds them (engine_model.engine_rounding)
    weight cast      the directory's weights
    activation cast  the engine's cast of each linear's input
    KV cache         keys and values through the cache's format
    router flips     the engine's router: until here each token went to training's experts

Arithmetic comes before casts, so that casts are compared in one arithmetic. An engine's kernels do not run here: the
order of sums is another than training's, and not the engine's. Router flips come last, since all other causes lead to
them. KL parts depend little on this order, as errors of different causes add in squares.
Rejected: each cause alone against training. Those do not add up, and a flip without the casts that cause it is none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..fp8_utils import quantizes
from ..huggingface.checkpoint_reader import Source
from ..linear.gemm_site import GemmSite
from ..mcore.checkpoint.loader import load_weights
from ..mcore.routing_replay import (
    count_changed_choices,
    record_routing,
    replay_routing,
    router_logits_in,
    routers_of,
)
from ..mcore.sites import check_plan, fp8_linears
from ..train.config.model_section import transformer_config
from ..train.model import EXCLUDED_WEIGHTS, build_model
from .engine_model import (
    EngineModel,
    UnreadableDirectory,
    engine_rounding,
    load_others,
    quantize_cache,
    read_engine_model,
)
from .engine_site import EngineSite
from .parity import Difference, Numbers, Parity, Part

MOST_VALUES = 2**28
"""Log-probabilities of training that are held at once: 2 GiB."""

Progress = Callable[[Iterable[Any], int], Iterable[Any]]


@dataclass
class _Measured:
    """Sums over tokens of what differs from training, the largest difference, and the engine's log-probabilities."""

    difference: float = 0.0
    absolute: float = 0.0
    kl: float = 0.0
    k3: float = 0.0
    ratio: float = 0.0
    largest: float = 0.0
    not_finite: int = 0
    engine: list[list[float]] = field(default_factory=list)

    def add(self, ours: torch.Tensor, theirs: torch.Tensor, targets: torch.Tensor) -> None:
        """Adds tokens. ``ours``: training's log-probabilities, float64 [n, V]; ``theirs``: the engine's; ``targets``:
        the tokens that follow, int64 [n]."""
        log_ratio = theirs - ours
        at_targets = log_ratio.gather(1, targets[:, None])[:, 0]
        absolute = at_targets.abs()
        self.difference += float(at_targets.sum())
        self.absolute += float(absolute.sum())
        self.kl += float((theirs.exp() * log_ratio).sum())
        self.k3 += float((torch.expm1(-at_targets) + at_targets).sum())
        self.ratio += float(absolute.exp().sum())
        self.largest = max(self.largest, float(absolute.max().nan_to_num(torch.inf)))
        self.not_finite += _not_finite(theirs)
        self.engine.append(theirs.gather(1, targets[:, None])[:, 0].tolist())


def _not_finite(log_probs: torch.Tensor) -> int:
    """Number of tokens with NaN or Inf, of [n, V]."""
    return int((~log_probs.isfinite()).any(1).sum())


class _Chain:
    """The computations on the same tokens.

    Args:
        rows: int64 [sequences, length].
        restored: training's model. Its weights are replaced by the engine's in the course of the chain.
    """

    def __init__(self, restored: Any, engine: EngineModel, rows: torch.Tensor, progress: Progress) -> None:
        self._restored, self._engine, self._progress = restored, engine, progress
        self._batches, self.model = rows.split(1), restored.model
        self._reference: list[torch.Tensor] = []
        self._routing: list[list[torch.Tensor]] = []
        self._sites: dict[str, GemmSite] = {}
        self._in_fp8 = quantizes(restored.run.model)
        self.flips = 0

    def training(self) -> int:
        """Computes training's side. Returns the number of tokens whose log-probabilities are not finite."""
        not_finite = 0
        for _, choices, found in self._forwards(None, recorded=True):
            self._reference.append(found[:, : self._engine.vocab_size])
            self._routing.append(choices)
            not_finite += _not_finite(found)
        return not_finite

    def steps(self) -> Iterator[tuple[str, _Measured]]:
        """Switches the causes on, one after the other; yields each with the difference from training so far."""
        engine = self._engine
        if engine.changes:
            self._rebuild(engine.changes)
        yield "config", self._measure()
        self._make_sites()
        with ExitStack() as stack:
            stack.enter_context(self._replaced())
            yield "order of sums", self._measure()
            stack.enter_context(engine_rounding(self.model, engine.norm_rounds_twice))
            yield "rounding", self._measure()
            load_others(self.model, engine.others)
            stack.enter_context(self._replaced(weights=True))
            yield "weight cast", self._measure()
            stack.enter_context(self._replaced(weights=True, inputs=True))
            yield "activation cast", self._measure()
            if engine.cache is not None:
                stack.enter_context(quantize_cache(self.model, engine.cache))
            yield "KV cache", self._measure()
            stack.enter_context(router_logits_in(self.model, engine.router_dtype))
            yield "router flips", self._measure(own_routing=True)

    def training_log_probs(self) -> list[list[float]]:
        """Of all of each sequence's tokens but the first."""
        pairs = zip(self._reference, self._batches, strict=True)
        return [each.gather(1, batch[0, 1:, None])[:, 0].tolist() for each, batch in pairs]

    def _measure(self, *, own_routing: bool = False) -> _Measured:
        """Compares the current computation with training's."""
        found = _Measured()
        forwards = self._forwards(None if own_routing else self._routing, recorded=own_routing, cut=True)
        for number, (batch, choices, theirs) in enumerate(forwards):
            found.add(self._reference[number], theirs, batch[0, 1:])
            if own_routing:
                self.flips += count_changed_choices(self._routing[number], choices)
        return found

    @torch.no_grad()
    def _forwards(
        self, routing: Sequence[Sequence[torch.Tensor]] | None, *, recorded: bool = False, cut: bool = False
    ) -> Iterator[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]]:
        """Yields each sequence, its routing, and the log-probabilities of its tokens but the first, float64 [n, V]."""
        self.model.eval()
        for number, batch in enumerate(self._progress(self._batches, len(self._batches))):
            positions = torch.arange(batch.shape[1], device=batch.device, dtype=torch.int64).expand_as(batch)
            choices: list[torch.Tensor] = []
            with ExitStack() as stack:
                if recorded:
                    choices = stack.enter_context(record_routing(self.model))
                elif routing is not None:
                    stack.enter_context(replay_routing(self.model, routing[number]))
                logits = self.model(batch, positions, None)[0, :-1]
            logits = logits[:, : self._engine.vocab_size] if cut else logits
            yield batch, choices, logits.double().log_softmax(-1)

    def _rebuild(self, changes: Mapping[str, Any]) -> None:
        """Replaces the model by one with other settings and training's weights.

        Raises UnreadableDirectory if these weights are not such a model's.
        """
        run = copy.deepcopy(self._restored.run)
        for name, value in changes.items():
            setattr(run.model, name, value)
        self._restored.run = run
        self.model = self._restored.model = None  # one model at a time
        try:
            self.model = build_model(transformer_config(run.model), run, self._restored.vocab_size)
            left_out = (*EXCLUDED_WEIGHTS, *self._engine.lacks)
            load_weights(self._restored.folder, self.model, left_out=left_out)
        except ValueError as error:
            raise UnreadableDirectory(
                f"config.json describes a model without training's weights: {error}"
            ) from error
        check_plan([self.model])

    def _make_sites(self) -> None:
        """Makes a model in which every linear of the layers is a site that can be replaced."""
        run, changes = self._restored.run, dict[str, Any]()
        if not self._in_fp8:
            changes = {"fp8": "hybrid", "fp8_recipe": "rowwise", "fp8_backend": "emulated"}
        if run.model.num_moe_experts and run.model.moe_grouped_gemm:
            changes["moe_grouped_gemm"] = False
        if changes:
            self._rebuild(changes)
        self._sites = {linear.fp8_site.plan.name: linear.fp8_site for linear in fp8_linears([self.model])}

    @contextmanager
    def _replaced(self, *, weights: bool = False, inputs: bool = False) -> Iterator[None]:
        """Context: all linears multiply decoded operands, training's or the engine's."""
        engine = self._engine
        with ExitStack() as stack:
            for name, site in self._sites.items():
                weight = engine.weight(name) if weights else None
                cast = engine.casts.get(name) if inputs else None
                made = EngineSite(site, self._in_fp8, weight=weight, inputs=inputs, cast=cast)
                stack.enter_context(site.replaced_by(made))
            yield


def check_size(tokens: int, vocab_size: int) -> None:
    """Raises ValueError if too many log-probabilities would be held at once."""
    if tokens * vocab_size > MOST_VALUES:
        raise ValueError(
            f"--tokens={tokens} with a vocabulary of {vocab_size:,} are more than the {MOST_VALUES:,} log-probabilities"
            f" that are held at once: give {MOST_VALUES // vocab_size} at most."
        )


def compare_numbers(
    restored: Any, engine: EngineModel, rows: torch.Tensor, progress: Progress = lambda items, _: items
) -> Numbers:
    """Computes both sides on the same tokens.

    Args:
        restored: training's model on one rank (train.resume.restore.RestoredModel). Its weights are replaced.
        rows: int64 [sequences, length], on the model's device.

    Raises UnreadableDirectory.
    """
    count, length = rows.shape
    tokens = count * (length - 1)
    chain = _Chain(restored, engine, rows, progress)
    not_finite = {"training": chain.training()}
    steps = dict(chain.steps())
    not_finite |= {cause: measured.not_finite for cause, measured in steps.items()}
    parts, before = [], _Measured()
    for cause, measured in steps.items():
        sums = (measured.kl - before.kl, measured.k3 - before.k3, measured.absolute - before.absolute)
        parts.append(
            Part(cause, *(each / tokens for each in (*sums, measured.difference - before.difference)))
        )
        before = measured
    totals = (before.kl, before.k3, before.absolute, before.difference)
    choices = len(routers_of(chain.model)) * count * length
    return Numbers(
        tokens,
        parts,
        Part("whole", *(each / tokens for each in totals)),
        before.largest,
        before.ratio / tokens,
        chain.flips,
        choices,
        {name: number for name, number in not_finite.items() if number},
        rows.tolist(),
        chain.training_log_probs(),
        before.engine,
    )


def add_numbers(
    found: Parity,
    source: Source,
    directory: Path,
    restored: Any,
    rows: torch.Tensor,
    max_kl: float,
    kv_cache_dtype: str,
    progress: Progress,
) -> None:
    """Computes both sides and adds the numbers to a comparison; a directory that cannot be computed is a difference
    that nothing accepts.

    Args:
        source, restored: the checkpoint, and its model on one rank. The model is used up.
        rows: int64 [sequences, length], on the model's device.
    """
    try:
        engine = read_engine_model(source, directory, found.engine, restored.vocab_size, kv_cache_dtype)
        found.add_numbers(compare_numbers(restored, engine, rows, progress), max_kl)
    except UnreadableDirectory as error:
        found.differences.append(Difference("no numbers", "*", "is computed", f"is not: {error}"))
