"""Exports a checkpoint in any layout to a directory for transformers and vLLM.

Tensors are read whole, one by one, from the checkpoint's files: no ranks, no model, no Megatron-Core. Weights
are in high precision, rounded from the float32 masters, even if they were FP8 parameters. Training quantized
the same values, so the codes are the same (docs/export.md lists the layouts).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .architectures import fused_latents
from .aux_files import describe, write_aux_files
from .checkpoint_reader import Source
from .config import exported_architecture
from .directory import CONFIG, new_directory, read_json, write_json, write_tensors
from .formats import WeightFormat, hf_quant_config, quantization_config, with_source_settings
from .weight_plan import ExportOptions, Progress, WeightPlan


@dataclass
class ExportResult:
    """What was written: config, tensor files, number of quantized linears, names of the others, and notes on
    what of --like was not used and what engines misread."""

    config: dict[str, Any]
    files: list[str]
    quantized: int
    kept: list[str]
    notes: list[str]


def export(source: Source, out: Path, wanted: ExportOptions, progress: Progress) -> ExportResult:
    """Write `source` into the new directory `out`.

    Raises ValueError, and leaves no files: no family computes the same, a tensor is missing, unexpected or of
    another shape, a glob matches nothing, or the directory exists.
    """
    architecture = exported_architecture(source.section)
    config = describe(source, wanted.like, wanted.vocab_size, wanted.positions)
    plan = WeightPlan(source, wanted, architecture, config["vocab_size"])
    notes: list[str] = []
    with new_directory(out) as folder:
        if wanted.form:
            about = wanted.form, plan.ignored(), wanted.static_inputs, wanted.kv_cache
            config["quantization_config"] = quantization_config(*about)
            if wanted.form.method == "modelopt":
                write_json(folder / "hf_quant_config.json", hf_quant_config(*about))
            if wanted.kv_cache and wanted.form.in_blocks:
                notes.append(
                    "config.json has no entry for the KV cache in this form: start vLLM with --kv-cache-dtype=fp8"
                )
            notes += _reader_notes(wanted.form, plan.sites, plan.high_precision)
            if wanted.form.in_blocks and wanted.like:
                assert plan.recipe is not None
                theirs = read_json(wanted.like / CONFIG).get("quantization_config") or {}
                all_came = plan.came.union(plan.stays).issuperset(entry.megatron for entry in plan.listed)
                config["quantization_config"], more = with_source_settings(
                    config["quantization_config"], theirs, None if all_came else plan.recipe.rule("weight")
                )
                notes += more
        files = write_tensors(folder, plan.tensors(progress), wanted.shard_bytes)
        write_aux_files(folder, source, config, wanted.like)
    linears = sum(map(len, plan.sites.values()))
    quantized = linears - len(plan.high_precision) if wanted.form else 0
    return ExportResult(config, files, quantized, plan.kept(), notes)


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
