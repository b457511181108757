"""The site report: one entry per GEMM site of the whole model, with its precision."""

from __future__ import annotations

import re
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from ..files.gc_pause import gc_paused
from ..fp8_utils import quantizes, switch_of
from ..plan.settings import DEFAULT_RECIPE
from ..plan.site_plan import bf16_site
from ..state.collectives import union
from .config.transformer_config import TransformerConfig
from .names import named_modules, split_expert
from .runtime import unwrap
from .sites import fp8_linears, prepare


def parallel_layout(config: Any) -> dict[str, Any]:
    """Returns the sizes of all kinds of parallelism of this run."""
    return {
        "tensor": config.tensor_model_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
        "virtual_pipeline": config.virtual_pipeline_model_parallel_size,
        "context": config.context_parallel_size,
        "expert": config.expert_model_parallel_size,
        "data": parallel_state.get_data_parallel_world_size(),
        "sequence_parallel": config.sequence_parallel,
    }


def own_precision(config: Any) -> str:
    """Returns the model's own dtype as reports call it: 'bf16' or 'fp16'."""
    return "fp16" if config.fp16 else "bf16"


@gc_paused()
def site_report(model_chunks: list[Any], *, gather: bool = True) -> list[dict[str, Any]]:
    """Returns one entry per GEMM site: SitePlan.as_dict(), the site's notes, and the phases of an FP8 site
    (Phases.describe; empty if all iterations are FP8).

    Args:
        model_chunks: this rank's chunks.
        gather: join the sites of all ranks (collective, needs torch.distributed); tensor- and data-parallel copies of
            a site share an entry. Entries come in layer order, experts of a layer by number.
    """
    prepare(model_chunks)
    config = unwrap(model_chunks[0]).config
    own = own_precision(config)
    entries: list[dict[str, Any]] = []
    for chunk in model_chunks:
        model = unwrap(chunk)
        for name, module in named_modules(model):
            if hasattr(module, "bind_fp8_site"):
                site = module.fp8_site
                phases = _phases_of(site, own, switch_of(config)) if site.is_fp8 else []
                entries.append({**site.plan.as_dict(), "notes": sorted(site.notes), "phases": phases})
            elif isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                plain = bf16_site(name, None, "not inside a transformer layer: stays in the model's dtype")
                entries.append({**plain.as_dict(), "notes": [], "phases": []})
    if gather:  # entries of replicas are equal, except for their notes
        entries = list(union({(entry["name"], *entry["notes"]): entry for entry in entries}).values())
    merged: dict[str, dict[str, Any]] = {}
    for entry in entries:
        first = merged.setdefault(entry["name"], entry)
        first["notes"] = sorted({*first["notes"], *entry["notes"]})
        # The model's own dtype in place of 'bf16'.
        first["precision"] = first["precision"].replace("bf16", own)
        first["gemms"] = {gemm: precision.replace("bf16", own) for gemm, precision in first["gemms"].items()}
    places: dict[str, int] = {}
    for name in merged:
        places.setdefault(split_expert(name)[0], len(places))

    def place(entry: dict[str, Any]) -> tuple[int, int, int]:
        alike, expert = split_expert(entry["name"])
        return len(merged) if entry["layer"] is None else entry["layer"], places[alike], expert

    return sorted(merged.values(), key=place)


def _phases_of(site: Any, own: str, quantized: str) -> list[dict[str, Any]]:
    """Returns the phases of an FP8 site; in a healing phase of parts with its own precision, and its GEMMs' if some
    heal."""
    entries = site.state.phases.describe(own, quantized)
    for entry in entries:
        if entry.pop("parts", None):
            entry["precision"] = own if site.heals else quantized
            if site.healed is not None:
                gemms = site.healed.plan.reported_gemms.items()
                entry["gemms"] = {gemm: precision.replace("bf16", own) for gemm, precision in gemms}
    return entries


def recipe_line(config: Any) -> str:
    """Returns the first line of a printed plan: the config's FP8 settings and where its recipe comes from."""
    if not quantizes(config):
        return f"{own_precision(config).upper()}: fp8 is off"
    if config.fp8:
        settings = f"FP8 {config.fp8}, fp8_recipe {config.fp8_recipe}"
    else:
        settings = f"FP4 {config.fp4}, fp4_recipe {config.fp4_recipe}"
    if isinstance(config, TransformerConfig) or not config.fp8 or config.fp8_recipe != "delayed":
        return settings
    return (
        f"{settings} (Megatron-Core's TransformerConfig defaults to 'delayed', megatron_fp8.TransformerConfig to"
        f" {DEFAULT_RECIPE!r})"
    )


def plan_summary(model_chunks: list[Any]) -> str:
    """Returns one line on the plan of this rank's linears, without communication."""
    config = unwrap(model_chunks[0]).config
    plans = [linear.fp8_site.plan for linear in fp8_linears(model_chunks)]
    backends = sorted({str(plan.backend) for plan in plans if plan.precision != "bf16"})
    reduced = sum(plan.precision != "bf16" for plan in plans)
    kept = f", {len(plans) - reduced} in {own_precision(config).upper()}" if reduced < len(plans) else ""
    return (
        f"megatron_fp8: {recipe_line(config)}: {reduced} of the first rank's {len(plans)} linears in layers are in"
        f" {switch_of(config).upper()} (backend {' and '.join(backends) or 'none'}){kept};"
        " megatron_fp8.mcore.print_plan(model) says why"
    )


def plan_lines(entries: list[dict[str, Any]]) -> list[str]:
    """Formats a site report as text: sites that differ only in their layer share a line, which begins with their
    number."""
    alike: dict[tuple[str, ...], int] = {}
    for entry in entries:
        name = re.sub(r"(?<=\.)\d+(?=\.)", "#", entry["name"])
        runs = " ".join(filter(None, (entry["precision"], entry["recipe"], entry["backend"])))
        key = (name, runs, "; ".join([entry["reason"], *entry["notes"]]))
        alike[key] = alike.get(key, 0) + 1
    widths = [max((len(key[i]) for key in alike), default=0) for i in (0, 1)]
    return [f"{n:>4} x {key[0]:<{widths[0]}}  {key[1]:<{widths[1]}}  {key[2]}" for key, n in alike.items()]
