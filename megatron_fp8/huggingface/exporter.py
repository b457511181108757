"""Exports a checkpoint in any layout to a directory for transformers and vLLM.

Tensors are read whole, one by one, from the checkpoint's files: no ranks, no model, no Megatron-Core. Weights
are in high precision, rounded from the float32 masters, even if they were FP8 parameters. Training quantized
the same values, so the codes are the same (docs/export.md lists the layouts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..fp8_utils import is_first_last_bf16_layer
from ..inference.calibration import Calibration
from ..plan.cast_spec import CastSpecs
from ..plan.overrides import FORMATS, matching
from ..recipe import Float8CurrentScaling
from .architectures import Entry, entries, fused_latents, gemms, never_fp8
from .aux_files import describe, write_companions
from .block_scales import as_it_came, came_as_blocks, came_in_high_precision
from .checkpoint_reader import Source
from .config import exported_architecture
from .directory import CONFIG, new_directory, read_json, write_json, write_tensors
from .formats import (
    WeightFormat,
    encode,
    hf_quant_config,
    quantization_config,
    static_input_scale,
    weight_recipe,
    with_what_it_says,
)
from .layout import heads_of, megatron_shape, split_qkv


@dataclass(frozen=True)
class Wanted:
    """Options of an export.

    Attributes:
        form: format of the layers' linears; None: high precision.
        ignore: globs over Hugging Face names of linears to leave in high precision.
        follow_training: linears that were BF16 in training stay BF16.
        calibration: input ranges; static scales are written.
        like: a directory from which further config fields, generation config and tokenizer are copied.
        vocab_size, positions: override the run's.
        shard_bytes: size limit of a file.
    """

    form: WeightFormat | None = None
    ignore: tuple[str, ...] = ()
    follow_training: bool = True
    calibration: Calibration | None = None
    like: Path | None = None
    vocab_size: int | None = None
    positions: int | None = None
    shard_bytes: int = 5_000_000_000


@dataclass
class Exported:
    """What was written: config, tensor files, number of quantized linears, names of the others, and notes on
    what of --like was not used and what engines misread."""

    config: dict[str, Any]
    files: list[str]
    quantized: int
    kept: list[str]
    notes: list[str]


def export(
    source: Source, out: Path, wanted: Wanted, progress: Callable[[Iterable[Any], int], Iterable[Any]]
) -> Exported:
    """Write `source` into the new directory `out`.

    Args:
        progress: (items, count) -> the same items; shows progress during iteration.

    Raises ValueError, and leaves no files: no family computes the same, a tensor is missing, unexpected or of
    another shape, a glob matches nothing, or the directory exists.
    """
    architecture = exported_architecture(source.section)
    listed = list(entries(architecture, source.section))
    config = describe(source, wanted.like, wanted.vocab_size, wanted.positions)
    _check_tensors(source, listed, config["vocab_size"])
    sites = gemms(listed)
    high_precision = _high_precision_linears(source.section, sites, wanted) if wanted.form else set()
    in_blocks = wanted.form is not None and wanted.form.in_blocks
    if in_blocks and wanted.follow_training:
        high_precision |= came_in_high_precision(source, listed)
    if wanted.calibration is not None:
        _check_calibration(
            wanted.calibration, listed, {**source.section, "vocab_size": config["vocab_size"]}, high_precision
        )
    notes: list[str] = []
    with new_directory(out) as folder:
        stays = {entry.megatron for entry in listed if entry.site is None or _linear(entry) in high_precision}
        blocks = {entry.megatron for entry in listed if in_blocks and came_as_blocks(source, entry)}
        floats = stays.intersection(source.origin.floats) if in_blocks else set()
        came = blocks - stays
        parts = _parts(source, progress(listed, len(listed)), config["vocab_size"], came, floats)
        if wanted.form:
            ignored = ["lm_head", *never_fp8(listed), *sorted(high_precision, key=_by_layer)]
            static_inputs = wanted.calibration is not None
            config["quantization_config"] = quantization_config(wanted.form, ignored, static_inputs)
            if wanted.form.method == "modelopt":
                write_json(folder / "hf_quant_config.json", hf_quant_config(ignored, static_inputs))
            notes += _reader_notes(wanted.form, sites, high_precision)
            if in_blocks and wanted.like:
                theirs = read_json(wanted.like / CONFIG).get("quantization_config") or {}
                anew = weight_recipe(wanted.form, source.section).rule("weight")
                all_came = came.issuperset(entry.megatron for entry in listed if entry.megatron not in stays)
                config["quantization_config"], more = with_what_it_says(
                    config["quantization_config"], theirs, None if all_came else anew
                )
                notes += more
            written = _quantized(parts, source, sites, high_precision, came, wanted)
        else:
            written = (named for _, tensors in parts for named in tensors.items())
        files = write_tensors(folder, written, wanted.shard_bytes)
        write_companions(folder, source, config, wanted.like)
    linears = sum(map(len, sites.values()))
    return Exported(
        config,
        files,
        linears - len(high_precision) if wanted.form else 0,
        sorted(high_precision, key=_by_layer),
        notes,
    )


# ------------------------------------------------------------------------------------------------------------- tensors


def _check_tensors(source: Source, listed: list[Entry], vocab_size: int) -> None:
    """Raises ValueError unless the checkpoint has exactly the model's tensors, in the config's shapes."""
    stored = source.weights()
    section = {**source.section, "vocab_size": vocab_size}
    expected_shape = {entry.megatron for entry in listed}
    for names, words in (
        (expected_shape - stored, "has no"),
        (stored - expected_shape, "has, and the exported model has not,"),
    ):
        if names:
            raise ValueError(f"the checkpoint {str(source.folder)!r} {words} {sorted(names)[0]}.")
    for entry in listed:
        have, expected = source.shape(entry.megatron), megatron_shape(entry, section)
        padded = entry.vocabulary and have[0] > expected[0] and have[1:] == expected[1:]
        if have != expected and not padded:
            raise ValueError(
                f"{entry.megatron} is {have} in {str(source.folder)!r}, and its config says {expected}."
            )


def _parts(
    source: Source, listed: Iterable[Entry], vocab_size: int, came: set[str], floats: set[str]
) -> Iterator[tuple[Entry, dict[str, torch.Tensor]]]:
    """Hugging Face tensors in high precision, entry by entry. Not rounded are those of ``came``, since their codes
    follow from them, and ``floats``, which were float32 or float16. Raises ValueError for a tensor with NaN or Inf."""
    for entry in listed:
        name = entry.megatron
        tensor = source.tensor(name, as_stored=entry.as_stored or name in came or name in floats)
        if name in floats:
            tensor = tensor.to(source.origin.dtype(name))
        if not bool(tensor.isfinite().all()):
            raise ValueError(
                f"{entry.megatron} holds NaN or Inf: training diverged. Export an earlier checkpoint."
            )
        if entry.vocabulary:
            tensor = tensor[:vocab_size]
        parts = split_qkv(tensor, heads_of(source.section)) if entry.qkv else (tensor,)
        yield entry, dict(zip(entry.parts, parts, strict=True))


def _quantized(
    parts: Iterator[tuple[Entry, dict[str, torch.Tensor]]],
    source: Source,
    sites: dict[str, tuple[str, ...]],
    high_precision: set[str],
    came: set[str],
    wanted: Wanted,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, with linears' weights replaced by codes and scales, GEMM by GEMM."""
    form = wanted.form
    assert form is not None
    recipe = weight_recipe(form, source.section)
    pending: dict[str, torch.Tensor] = {}
    for entry, tensors in parts:
        if entry.site is None or _linear(entry) in high_precision:
            yield from tensors.items()
            continue
        if entry.megatron in came:
            yield from as_it_came(source, entry, tensors).items()
            continue
        pending |= tensors
        names = sites[entry.site]
        if not form.in_blocks and len(pending) < len(names):  # wait for the GEMM's other parts
            continue
        yield from encode(pending, form, recipe, source.origin.lost).items()
        if wanted.calibration is not None:
            scale = static_input_scale(wanted.calibration.input_amax(entry.site), form)
            yield from ((f"{part}.{form.input_scale}", scale.clone()) for part in names)
        pending = {}
    assert not pending, list(pending)


def _check_calibration(
    calibration: Calibration, listed: list[Entry], section: dict[str, Any], high_precision: set[str]
) -> None:
    """Raises ValueError unless the input of every linear to be quantized was calibrated, with the linear's shape."""
    shapes = _site_shapes(listed, section)
    for site, parts in gemms(listed).items():
        if high_precision.issuperset(parts):
            continue
        shape = shapes[site]
        found = calibration.ranges.get(f"{site}.input")
        if found is None or list(found.shape) != shape:
            what = "nothing of it" if found is None else list(found.shape)
            raise ValueError(
                f"the calibration is of another model: {site} is {shape} here, and {what} there. Calibrate the "
                "checkpoint that is exported."
            )


def _site_shapes(listed: list[Entry], section: dict[str, Any]) -> dict[str, list[int]]:
    """Shape of the whole weight of each linear in the layers."""
    shapes: dict[str, list[int]] = {}
    for entry in listed:
        if entry.site is not None:
            rows, cols = megatron_shape(entry, section)
            shapes[entry.site] = [rows + shapes.get(entry.site, [0])[0], cols]
    return shapes


# ------------------------------------------------------------------------------------------- what stays high precision


def _high_precision_linears(
    section: dict[str, Any], sites: dict[str, tuple[str, ...]], wanted: Wanted
) -> set[str]:
    """Linears of the layers that stay in high precision: those the user names, and those that were BF16 in
    training.

    Raises ValueError: a glob matches nothing, or only a part of a GEMM that an inference engine fuses.
    """
    excluded: set[str] = set()
    for glob in wanted.ignore:
        found = {part for parts in sites.values() for part in parts if fnmatchcase(part, glob)}
        if not found and not fnmatchcase("lm_head", glob):
            first = next(iter(sites.values()))[0]
            raise ValueError(f"--ignore={glob!r} matches no linear: they have names such as {first}.")
        excluded |= found
    gemm_parts = [*sites.values(), *fused_latents(sites)]
    for parts in gemm_parts:
        rest = [part for part in parts if part not in excluded]
        if rest and len(rest) < len(parts):
            raise ValueError(
                f"--ignore leaves {rest[0]} in FP8 and not {next(p for p in parts if p in excluded)}: inference engines"
                " multiply them as one GEMM, and they must be ignored together."
            )
    if wanted.follow_training and (section.get("fp8") or section.get("fp4")):
        trained = {part for site, parts in sites.items() if _trained_in_bf16(site, section) for part in parts}
        for parts in gemm_parts:
            if not trained.isdisjoint(parts):
                excluded.update(parts)
    if len(excluded) == sum(map(len, sites.values())):
        raise ValueError("every linear would stay in high precision: give --format=bf16, or --quantize-all.")
    return excluded


def _reader_notes(
    form: WeightFormat, sites: dict[str, tuple[str, ...]], high_precision: set[str]
) -> list[str]:
    """Notes on linears that engines read wrongly, without an error or with one."""
    notes = []
    pairs = [pair for pair in fused_latents(sites) if high_precision.isdisjoint(pair)]
    if pairs and form.tensor_scale is not None:
        notes.append(
            f"vLLM multiplies {pairs[0][0]} and {pairs[0][1].rpartition('.')[2]} as one matrix with one of their two"
            " tensor scales, which is wrong for the other: for vLLM, --ignore both"
        )
    experts = any(
        ".experts." in part for parts in sites.values() for part in parts if part not in high_precision
    )
    if experts and form.strategy in _EXPERTS:
        notes.append(f"transformers 5.23 {_EXPERTS[form.strategy]}")
    return notes


_EXPERTS = {
    "group": "cannot load experts in mxfp8: for transformers, --ignore='*.experts.*'",
    "tensor_group": "loads experts in nvfp4 without their tensor scales, 10,000 times too large: for transformers, use"
    " another format",
}


def _trained_in_bf16(site: str, section: dict[str, Any]) -> bool:
    """Whether the training forward read a linear's weight in BF16, by its name or because it is in one of the first and
    last layers."""
    # Multi-token prediction layers do not count as first or last.
    layer = int(site.split(".")[2]) if site.startswith("decoder.") else -1
    overrides = {name: section.get(name, default) for name, default in _LAYERS_IN_BF16.items()}
    at_an_end = is_first_last_bf16_layer(
        SimpleNamespace(num_layers=section["num_layers"], **overrides), layer
    )
    some = Float8CurrentScaling()  # any recipe will do: a checkpoint's custom recipe code is not imported
    choices = CastSpecs.of(some, bf16_reason="first_last_layers_bf16" if at_an_end else None)
    for override in matching(site, section.get("fp8_overrides") or {}):
        choices = choices.after(override, None if override.value in ("bf16", *FORMATS) else some, "")
    return choices.operands()["fprop"]["weight"] is None


_LAYERS_IN_BF16 = {
    "first_last_layers_bf16": False,
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1,
}
"""Megatron-Core's defaults, for sections without these fields."""


def _linear(entry: Entry) -> str:
    """The linear whose weight, or first part of a weight, the entry is."""
    return entry.parts[0].removesuffix(".weight")


def _by_layer(name: str) -> tuple[int, str]:
    return int(name.split(".")[2]), name
