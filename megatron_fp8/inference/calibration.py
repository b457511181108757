"""Calibration: activation statistics over some batches, and static scales computed from them.

    calibration = calibrate(model, batches)                  # every linear's input, in high precision
    calibration.save("runs/mine/calibration")
    prepare_for_inference(model, calibration=calibration)    # static activation scales
    calibration.fill_history(model)                          # or: the first histories of delayed scaling

The model runs in high precision during calibration, since quantized activations would include errors of
earlier layers.

A static scale comes from the amax or from a percentile; with a percentile a few outliers saturate, and all
other values get finer steps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..files.argument_check import check_model
from ..files.atomic_io import as_value_error, error_text, read_regular
from ..files.strict_json import load_json
from ..linear.tensor_parallel import weight_of
from ..numerics.formats import E4M3
from ..numerics.rule import TENSOR, Rule
from ..numerics.scaling import compute_scale, compute_scale_inv
from ..plan.autocast_state import fp8_disabled
from ..state.collectives import checked_group
from .kv_cache import ROLES, attentions, record_keys_and_values
from .magnitude_counts import MagnitudeCounts, merge_ranks

FORMAT, VERSION = "megatron_fp8 calibration", 1
TENSORS, RECORD = "calibration.safetensors", "calibration.json"
PERCENTILES = (50.0, 99.0, 99.9, 99.99)
_LARGEST = 1 << 30  # bytes per file


def fp8_modules(model: torch.nn.Module) -> list[Any]:
    """The model's linears with a GEMM site, in module order, with names relative to the model."""
    check_model(model)
    modules: list[Any] = [module for module in model.modules() if hasattr(type(module), "fp8_site")]
    for module in modules:
        if name_sites := getattr(module, "name_sites", None):
            name_sites(model)  # names are relative to the whole model
            break
    return modules


def whole_shape(linear: Any) -> tuple[int, int]:
    """(N, K) of a linear's weight over all tensor-parallel ranks, from the attributes that Megatron-Core sets on
    weights."""
    if hasattr(linear, "fp8_sites"):  # an nn linear; its weight may be parametrised
        return linear.out_features, linear.in_features
    weight: Any = weight_of(linear)
    rows, cols = weight.shape
    if getattr(weight, "tensor_model_parallel", False):
        size = linear.tp_group.size()
        return (rows * size, cols) if weight.partition_dim == 0 else (rows, cols * size)
    return rows, cols


@dataclass(frozen=True)
class Range:
    """Calibrated range of one tensor.

    Attributes:
        amax: largest magnitude to represent.
        amaxes: float32 [batches], the largest finite magnitude of each batch; [1] for a weight.
        shape: (N, K) of the linear's weight, over all tensor-parallel ranks; of keys and values (heads, a head's size).
        statistics: for information: max, percentiles, fraction above amax, NaN and Inf count.
    """

    amax: float
    amaxes: torch.Tensor
    shape: tuple[int, int]
    statistics: dict[str, float]


@dataclass
class Calibration:
    """Ranges by '<site>.input' and '<site>.weight', and an attention's '.key' and '.value'. ``facts``: plain values about
    the calibration run."""

    ranges: dict[str, Range]
    facts: dict[str, Any] = field(default_factory=dict)

    def scale(self, site: str, rule: Rule) -> torch.Tensor:
        """float32 [], the static scale of a site's input under a rule: code = x * scale; of NVFP4 the tensor's amax, from
        which its scales follow. Raises as ``input_amax``."""
        if rule.scale == "e4m3":
            return self.input_amax(site)
        return compute_scale(
            self.input_amax(site), rule.fmt, margin=rule.margin, epsilon=rule.epsilon, pow2=rule.pow2
        )

    def input_amax(self, site: str) -> torch.Tensor:
        """float32 [], the largest magnitude that a static scale of a site's input represents.

        Raises ValueError if all inputs were zero (an expert without tokens): no scale can be computed.
        """
        amax = torch.tensor(self.ranges[f"{site}.input"].amax, dtype=torch.float32, device="cpu")
        if not amax > 0:
            raise ValueError(
                f"the calibration saw nothing but zeros go into {site}, and has no static scale for it: calibrate on more"
                " text (or a higher percentile), or scale activations dynamically"
            )
        return amax

    def input_scale_inv(self, site: str) -> torch.Tensor:
        """float32 [], the inverse of the static E4M3 scale: ``input_scale`` in checkpoints for other engines."""
        return compute_scale_inv(self.scale(site, Rule(E4M3, TENSOR)))

    def kv_scale_inv(self, attention: str, role: str) -> torch.Tensor:
        """float32 [], the inverse of the static E4M3 scale of an attention's 'key' or 'value': an engine's `k_scale`.

        Raises ValueError if the calibration lacks it, or saw only zeros.
        """
        found = self.ranges.get(f"{attention}.{role}")
        if found is None:
            raise ValueError(
                f"the calibration has no {role}s of {attention}: calibrate again with megatron-fp8 calibrate, which"
                " measures keys and values of Megatron-Core's attention, but no latents"
            )
        if not found.amax > 0:
            raise ValueError(
                f"the calibration saw nothing but zeros as {role}s of {attention}: calibrate on more text"
            )
        amax = torch.tensor(found.amax, dtype=torch.float32, device="cpu")
        return compute_scale_inv(compute_scale(amax, E4M3))

    def check(self, linears: Iterable[Any]) -> None:
        """Raises ValueError unless all these linears were calibrated with their current shapes."""
        for linear in linears:
            name = linear.fp8_site.plan.name
            found = self.ranges.get(f"{name}.input")
            if found is None:
                raise ValueError(
                    f"the calibration has nothing of {name}: it is of another model; calibrate this one"
                )
            if found.shape != whole_shape(linear):
                raise ValueError(
                    f"the calibration is of another model: {name} is {list(found.shape)} there and"
                    f" {list(whole_shape(linear))} here; calibrate this one"
                )

    def fill_history(self, model: torch.nn.Module) -> int:
        """Initialise delayed scaling in place: scales and histories of inputs and weights.

        The history consists of the latest batches that fit; the scale comes from the calibrated amax.
        Gradients were not measured and start cold.

        Returns the number of tensors that got a scale.

        Raises:
            ValueError: the calibration is of another model, or no linear uses delayed scaling.
        """
        linears = [
            m for m in fp8_modules(model) if any(q and q.slot.delayed for q in m.fp8_site.quantizers.values())
        ]
        if not linears:
            raise ValueError("no linear of the model uses delayed scaling: there is no history to fill")
        self.check(linears)
        filled = 0
        for linear in linears:
            for role in ("input", "weight"):
                quantizer = linear.fp8_site.quantizers[role]
                if quantizer is not None and quantizer.slot.delayed is not None:
                    filled += self._fill(quantizer.slot, f"{linear.fp8_site.plan.name}.{role}")
        return filled

    def _fill(self, slot: Any, name: str) -> bool:
        found = self.ranges[name]
        if not found.amax > 0:
            return False  # unused: stays cold
        saved = slot.arena.saved_slot(slot)
        history, latest = saved["amax_history"], found.amaxes[-len(saved["amax_history"]) :]
        room = min(len(history) - 1, len(latest))
        if room:
            history[-room:] = latest[-room:].clamp(max=found.amax)
        amax = torch.tensor([found.amax], device=history.device, dtype=torch.float32)
        delayed = slot.delayed
        saved["scale"] = compute_scale(amax, slot.fmt, margin=delayed.margin, epsilon=delayed.amax_epsilon)
        saved["warm"].fill_(1)
        slot.arena.load_slot(slot, saved)
        return True

    # ------------------------------------------------------------------------------------------------------ files

    def save(self, folder: str | Path) -> Path:
        """Write ``calibration.safetensors`` and ``calibration.json`` into a folder; returns the folder.

        Tensors, float32: '<site>.<role>.amax' [] and '<site>.<role>.amaxes' [batches]. The JSON file has
        format, version, the SHA-256 of the tensors' file, facts, and shape and statistics of each
        '<site>.<role>'.

        Raises:
            ValueError: the folder cannot be written.
        """
        from safetensors.torch import save

        folder = Path(folder)
        tensors = {}
        for name, found in self.ranges.items():
            tensors[f"{name}.amax"] = torch.tensor(found.amax, dtype=torch.float32, device="cpu")
            tensors[f"{name}.amaxes"] = found.amaxes.clone()
        content = save(tensors)
        record = {
            "format": FORMAT,
            "version": VERSION,
            "sha256": hashlib.sha256(content).hexdigest(),
            "facts": self.facts,
            "tensors": {n: {"shape": list(r.shape), **r.statistics} for n, r in self.ranges.items()},
        }
        with as_value_error(f"{str(folder)!r} cannot be written", ": give another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / TENSORS).write_bytes(content)
            (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return folder


def load_calibration(folder: str | Path) -> Calibration:
    """Loads the files of ``Calibration.save``.

    Raises:
        ValueError: a file is missing, truncated, altered or not a calibration; the message has the remedy.
    """
    folder = Path(folder)
    remedy = "run megatron-fp8 calibrate again"
    try:
        text, content = (read_regular(folder / name, _LARGEST) for name in (RECORD, TENSORS))
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        raise ValueError(
            f"there is no calibration in {str(folder)!r} ({missing} is missing): run megatron-fp8 calibrate first"
        ) from None
    except OSError as error:
        raise ValueError(
            f"the calibration in {str(folder)!r} cannot be read ({error_text(error)}): {remedy}"
        ) from error
    try:
        return _parse(text, content)
    except KeyError as error:
        raise ValueError(
            f"the calibration in {str(folder)!r} is damaged (it lacks {error}): {remedy}"
        ) from error
    except Exception as error:  # damaged files raise various errors in safetensors, json and torch
        raise ValueError(f"the calibration in {str(folder)!r} is damaged ({error}): {remedy}") from error


def _parse(text: bytes, content: bytes) -> Calibration:
    """Parses both files; raises any exception if they are not a calibration."""
    from safetensors.torch import load

    record = load_json(text)
    if record["format"] != FORMAT or record["version"] != VERSION:
        raise ValueError(f"format {record['format']!r}, version {record['version']!r}")
    if record["sha256"] != hashlib.sha256(content).hexdigest():
        raise ValueError(f"{TENSORS} is not what was written (its SHA-256 differs)")
    if not isinstance(record["facts"], dict):
        raise ValueError(f"facts is {type(record['facts']).__name__}, and no object")
    tensors = load(content)
    ranges = {}
    for name, statistics in record["tensors"].items():
        rows, cols = statistics.pop("shape")
        if not all(type(size) is int and size > 0 for size in (rows, cols)):
            raise ValueError(f"{name} has the shape [{rows!r}, {cols!r}]")
        amax, amaxes = tensors[f"{name}.amax"], tensors[f"{name}.amaxes"]
        for found, dims in ((amax, 0), (amaxes, 1)):
            if (
                found.dtype != torch.float32
                or found.dim() != dims
                or not found.isfinite().all()
                or (found < 0).any()
            ):
                raise ValueError(f"{name} has amaxes that are no finite float32 magnitudes")
        ranges[name] = Range(float(amax), amaxes, (rows, cols), statistics)
    return Calibration(ranges, record["facts"])


# ------------------------------------------------------------------------------------------------------- observation


@torch.no_grad()
def calibrate(
    model: torch.nn.Module,
    batches: Iterable[Any],
    forward: Callable[[Any], Any] | None = None,
    *,
    percentile: float | None = None,
    group: Any = None,
) -> Calibration:
    """Run batches through a model in high precision and evaluation mode, and measure every FP8 linear's input, and
    the keys and values of Megatron-Core's attentions.

    Args:
        model: built from this package's Megatron-Core layers, or converted by convert_to_fp8. Linears that
            the plan leaves in high precision are measured too. Weights and the training mode are unchanged
            afterwards.
        batches: arguments for ``forward``; by default model(batch), model(*batch) for a tuple, model(**batch)
            for a mapping.
        forward: runs one batch.
        percentile: percentage of values that static ranges must cover (above 0, at most 100); None: all of
            them.
        group: ranks with parts of the same linears (tensor and data parallel). Collective over the group; all
            ranks get the same calibration and need the same number of batches.

    Raises:
        ValueError: there is no batch or no FP8 linear, or percentile is out of range.
    """
    if percentile is not None and not 0 < percentile <= 100:
        raise ValueError(
            f"percentile {percentile!r}: a number above 0 and up to 100 is needed, such as 99.99"
        )
    checked_group(group)
    linears = fp8_modules(model)
    if not linears:
        raise ValueError("the model has no FP8 linear: build or convert it for FP8 first")
    run = forward or _forward_of(model)
    modes, count = [(module, module.training) for module in model.modules()], 0
    model.eval()
    try:
        cached: dict[str, tuple[MagnitudeCounts, tuple[int, int]]] = {}
        cores = attentions(model)
        for core in cores:
            cached |= {f"{core.name}.{role}": (MagnitudeCounts(), core.shape) for role in ROLES}
        with (
            fp8_disabled("calibration looks at high precision"),
            record_keys_and_values({name: one for name, (one, _) in cached.items()}, cores),
            _recording_inputs(linears) as seen,
        ):
            for batch in batches:
                run(batch)
                count += 1
            weights = [MagnitudeCounts() for _ in linears]
            for weight, linear in zip(
                weights, linears, strict=True
            ):  # in evaluation mode: computing a parametrised weight in training may change it
                weight.add(weight_of(linear).detach())
    finally:
        for module, training in modes:
            module.training = training
    if not count:
        raise ValueError("calibration was given no batch: give at least one")
    ranges: dict[str, Range] = {}
    for weight, linear in zip(weights, linears, strict=True):
        site, shape = linear.fp8_site.plan.name, whole_shape(linear)
        ranges[f"{site}.input"] = _range(merge_ranks(seen[site], group), percentile, shape)
        ranges[f"{site}.weight"] = _range(merge_ranks(weight, group), None, shape)
    for name, (one, shape) in cached.items():
        ranges[name] = _range(merge_ranks(one, group), percentile, shape)
    method = "max" if percentile is None else f"percentile {percentile:g}"
    return Calibration(ranges, {"method": method, "batches": count})


def _forward_of(model: torch.nn.Module) -> Callable[[Any], Any]:
    def forward(batch: Any) -> Any:
        if isinstance(batch, dict):
            return model(**batch)
        return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)

    return forward


@contextmanager
def _recording_inputs(linears: list[Any]) -> Iterator[dict[str, MagnitudeCounts]]:
    """Records the inputs of these linears, by site name."""
    seen = {linear.fp8_site.plan.name: MagnitudeCounts() for linear in linears}

    def watch(linear: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[linear.fp8_site.plan.name].add(args[0] if args else next(iter(kwargs.values())))

    hooks = [linear.register_forward_pre_hook(watch, with_kwargs=True) for linear in linears]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _range(seen: MagnitudeCounts, percentile: float | None, shape: tuple[int, int]) -> Range:
    largest = max(seen.amaxes, default=0.0)
    amax = largest if percentile is None else min(largest, seen.percentile(percentile))
    statistics = {
        "amax": amax,
        "max": largest,
        **{f"p{p:g}": seen.percentile(p) for p in PERCENTILES},
        "saturating": seen.above(amax),
        "nonfinite": seen.nonfinite,
        "values": int(seen.counts.sum()),
    }
    return Range(amax, torch.tensor(seen.amaxes, dtype=torch.float32, device="cpu"), shape, statistics)
