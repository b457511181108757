"""Formats an estimate as text of 80 columns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..files.terminal import number_ranges, wrap
from ..fp8_utils import quantizes, recipe_name_of
from .device import Device
from .estimate import Estimate
from .fp8_speedup import SiteGroup
from .memory_fit import Fit
from .roofline import calibration


def format_estimate(
    found: Estimate,
    bf16: Estimate | None,
    fits: Fit | None,
    sites: Sequence[SiteGroup],
    doubt: str | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The whole text.

    Args:
        bf16: estimate of the same run without FP8; None for a run without FP8.
        doubt: result of ``unsure``; replaces the verdict on whether FP8 pays.
        notes: in addition to those of the settings.
    """
    parts = [
        _header(found),
        _parameters(found),
        _memory(found),
        _communication(found),
        _time(found),
        _sites(found, sites),
    ]
    if bf16 is not None:
        without = f"{doubt}. BF16 takes {seconds(bf16.time.seconds)} a step; {_both_sizes(found, bf16)}"
        parts.append(pays(found, bf16) if doubt is None else wrap(without))
    if fits is not None:
        parts.append(_fit(found, fits))
    parts += [wrap(f"note: {note}") for note in (*found.settings.notes, *notes)]
    return "\n\n".join(part for part in parts if part)


def size(count: float) -> str:
    """Bytes in powers of 1000, three digits."""
    if abs(count) < 999.5:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
    return f"{count / 1000:.3g} TB"


def seconds(value: float) -> str:
    """A time, three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 0.9995:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def _header(found: Estimate) -> str:
    s, model = found.settings, found.settings.model
    layout = {
        "tensor": model.tensor_model_parallel_size,
        "pipeline": model.pipeline_model_parallel_size,
        "virtual": model.virtual_pipeline_model_parallel_size or 1,
        "context": model.context_parallel_size,
        "expert": model.expert_model_parallel_size,
        "data": s.data_parallel,
    }
    names = ", ".join(f"{name} {count}" for name, count in layout.items() if count > 1) or "one rank"
    high_precision = "BF16" if model.bf16 else model.params_dtype
    precision = f"{recipe_name_of(model)} ({model.fp8 or model.fp4})" if quantizes(model) else high_precision
    return (
        f"{s.gpus} GPU{'s' if s.gpus > 1 else ''}: {names}\n"
        f"{precision}; {s.microbatches} microbatches of {s.train.micro_batch_size} x"
        f" {s.train.seq_length} tokens a step"
    )


def _parameters(found: Estimate) -> str:
    p = found.parameters
    lines = [f"parameters {p.total:,}"]
    if p.active != p.total:
        lines.append(f"active     {p.active:,} for a token")
    if p.prediction:
        lines.append(f"prediction {p.prediction:,} more, of multi-token prediction")
    if p.padding:
        lines.append(f"padding    {p.padding:,} more, of the vocabulary")
    lines.append(f"operations {found.time.flops:.4g} a step (FLOPs of the model, forward and backward)")
    return "\n".join(lines)


def _memory(found: Estimate) -> str:
    full = found.fullest
    rows = [
        ("weights", full.state.weights),
        ("codes kept of weights", full.state.kept_codes),
        ("gradients", full.state.gradients),
        ("masters", full.state.masters),
        ("moments", full.state.moments),
        (f"activations, {_in_flight(found)} in flight", full.activations),
        ("working memory, about", full.working),
        ("total", full.total),
    ]
    title = "bytes on the fullest rank"
    if len(found.stages) > 1:
        title += f" (pipeline stage {full.stage})"
    parts = found.settings.model.virtual_pipeline_model_parallel_size or 1
    whose = f"one microbatch in the stage's {parts} chunks" if parts > 1 else "one microbatch"
    kinds = ", ".join(f"{kind} {size(count)}" for kind, count in full.by_kind.most_common() if count)
    columns = _columns([(f"  {name}", size(count)) for name, count in rows if count])
    return "\n".join([title, *columns, wrap(f"saved by {whose}: {kinds}", "  ", "    ")])


def _in_flight(found: Estimate) -> str:
    """Text for what is in flight: microbatches, or with virtual stages chunks of layers, one microbatch each."""
    full, model = found.fullest, found.settings.model
    count = sum(full.in_flight.values())
    if (model.virtual_pipeline_model_parallel_size or 1) == 1:
        return f"{count} microbatch{'es' if count != 1 else ''}"
    sizes = sorted({len(chunk.layers) for chunk in model.chunks() if chunk.stage == full.stage})
    return f"{count} chunks of {' to '.join(str(n) for n in dict.fromkeys((sizes[0], sizes[-1])))} layers"


def _communication(found: Estimate) -> str:
    rows = [
        (f"  {one.what}", f"{one.call}, {one.axis} {one.ranks}", size(one.sent))
        for one in sorted(found.wire[found.fullest.stage], key=lambda one: -one.sent)
        if one.sent >= 1e6
    ]
    return "\n".join(["sent by a rank in a step (1 MB and more)", *_columns(rows)]) if rows else ""


def _time(found: Estimate) -> str:
    time, device = found.time, found.device
    stage, count = time.stage, found.settings.microbatches
    rows = [
        ("  GEMMs of linears, casts included", seconds(stage.gemms * count)),
        ("  attention", seconds(stage.attention * count)),
        ("  norms, activations, residuals", seconds(stage.elementwise * count)),
        ("  output layer and loss", seconds(stage.output * count)),
        ("  exchange inside layers", seconds(stage.exchange * count)),
        ("  waiting for other stages", seconds(time.bubble)),
        ("  gradients and parameters, not hidden", seconds(stage.reduced)),
        ("  optimizer", seconds(stage.optimizer)),
        ("  step", seconds(time.seconds)),
    ]
    whose = device.name if found.has_device else f"{device.name} (no --device was given)"
    heading = f"step time by a roofline of {whose}: {device.source}. " + (
        "A bound from rates that GEMMs reached, not a measurement of this run."
        if device.measured
        else "Peaks of a data sheet; nothing was measured, and no run reaches them."
    )
    speed = f"  at most {time.mfu:.0%} MFU (of the BF16 peak), {time.tokens_per_second:,.0f} tokens/s"
    lines = [wrap(heading), *_columns(rows), speed]
    if assumed := [key for key, how in device.figures.items() if how.startswith("assumed")]:
        lines.append(wrap(f"assumed of {device.name}, not read: {', '.join(assumed)}", "  ", "    "))
    return "\n".join([*lines, wrap(how_far_off(), "  ", "    ")])


def how_far_off() -> str:
    """The roofline's calibration in one sentence."""
    found = calibration()
    ratios = sorted(found["ratio"].values())
    return (
        f"a real step took {ratios[0]:.1f} to {ratios[-1]:.1f} x the roofline on the one machine where both were measured"
        f" ({found['machine']}, a CPU, {found['date']}; {found['model']}); on GPUs nobody has compared them"
    )


def _sites(found: Estimate, sites: Sequence[SiteGroup]) -> str:
    if not quantizes(found.settings.model):
        return ""
    rows: list[tuple[str, ...]] = [
        ("  site", "layers", "runs", "fprop", "dgrad", "wgrad", "all", "input kept", "weight")
    ]
    for group in sites:
        site = group.site
        times = [f"{one.seconds / one.bf16:.2f}" for one in site.gemms]
        rows.append(
            (
                f"  {_short_name(group.name)}",
                number_ranges(group.layers),
                site.precision,
                *times,
                f"{site.seconds / site.seconds_bf16:.2f}",
                f"{site.input_bytes / site.input_bytes_bf16:.2f} x",
                f"{site.weight_bytes / site.weight_bytes_bf16:.2f} x",
            )
        )
    title = "what FP8 changes, by site: time of each GEMM with its casts, and bytes, over\nBF16's"
    return "\n".join([title, *_columns(rows)])


_TOO_NEAR = 0.05
"""Relative difference of step times below which the roofline does not distinguish precisions."""


def pays(found: Estimate, bf16: Estimate) -> str:
    """Whether FP8 pays, with the supporting values."""
    ratio, verdict = found.time.seconds / bf16.time.seconds, "FP8 and BF16 are too near to tell"
    if abs(ratio - 1) > _TOO_NEAR:
        verdict = "FP8 pays" if ratio < 1 else "FP8 does not pay"
    return wrap(
        f"{verdict}, by the roofline: a step takes {ratio:.2f} x BF16's {seconds(bf16.time.seconds)};"
        f" {_both_sizes(found, bf16)}. The times are bounds, not measurements"
    )


def _both_sizes(found: Estimate, bf16: Estimate) -> str:
    return f"the fullest rank holds {size(found.fullest.total)}, in BF16 {size(bf16.fullest.total)}"


def unsure(device: Device, native: bool | None, reason: str | None) -> str | None:
    """Replaces the verdict if FP8 would not run natively on the device, or if that is unknown; None otherwise."""
    if native:
        return None
    verdict = "would not run natively" if native is False else "may not run natively"
    return f"FP8 {verdict} on {device.name} ({reason}); these times assume hardware that runs it natively"


def _short_name(name: str) -> str:
    name = re.sub(r"^mtp\.layers\.(\d+)\.(transformer_layer\.)?", r"mtp \1: ", name)
    return name.replace("self_attention.", "").replace("local_experts.0.", "").replace("mlp.", "")


def _fit(found: Estimate, fits: Fit) -> str:
    room = f"{size(fits.there)} of {found.device.name}'s {size(found.device.memory)} (the rest is left to CUDA and NCCL)"
    if fits.fits:
        return wrap(f"fits: {size(fits.needed)} of {room}")
    verdict = f"does not fit: {size(fits.needed)} of {room}."
    if fits.change is None:
        least = f"Nothing tried is enough; the least was {size(fits.smallest)}. Use more GPUs."
        return wrap(f"{verdict} {least}")
    change = wrap(f"{verdict} It fits, with {size(fits.changed or 0)}, with:")
    return "\n".join([change, *(f"  {one}" for one in fits.change)])


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Aligns cells: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
