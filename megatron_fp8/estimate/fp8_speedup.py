"""What FP8 saves at each site: time of its GEMMs, bytes of its operands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..fp8_utils import quantizes, recipe_name_of
from .activations import linear_input
from .config_reader import Settings
from .device import Device
from .fp8_weights import is_fp8_parameter, stored_weight
from .model import Model
from .model_state import stores_both
from .parameter_counts import gathers_input
from .roofline import GemmTime, Linear, gemm_times, linears, output_linear


@dataclass(frozen=True)
class SiteSpeedup:
    """One site on one rank, for one microbatch.

    Attributes:
        linear: its sizes.
        precision, reason: its precision, and why.
        gemms: roofline of its three GEMMs.
        input_bytes, input_bytes_bf16: input saved for backward, as planned and in BF16.
        weight_bytes, weight_bytes_bf16: weight and its codes, as planned and in BF16.
    """

    linear: Linear
    precision: str
    reason: str
    gemms: tuple[GemmTime, ...]
    input_bytes: int
    input_bytes_bf16: int
    weight_bytes: int
    weight_bytes_bf16: int

    @property
    def seconds(self) -> float:
        """Seconds of its GEMMs and casts."""
        return sum(gemm.seconds for gemm in self.gemms)

    @property
    def seconds_bf16(self) -> float:
        """Seconds of its GEMMs in BF16."""
        return sum(gemm.bf16 for gemm in self.gemms)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        found = {key: value for key, value in vars(self).items() if key not in ("linear", "gemms")}
        return {**asdict(self.linear), **found, "gemms": [asdict(gemm) for gemm in self.gemms]}


def site_speedups(settings: Settings, device: Device) -> Iterator[SiteSpeedup]:
    """All sites of the model by layer, plus the output projection with fp8_output_layer."""
    model, size = settings.model, settings.model.activation_bytes
    sites = [linear for layer in (*model.layers, *model.predicting) for linear in linears(settings, layer)]
    if model.fp8_output_layer:
        sites.append(output_linear(settings))
    for linear in sites:
        plan, n, k = settings.plan(linear.site), linear.n, linear.k
        rows = linear.tokens // (model.token_share if gathers_input(linear.site) else 1)
        weight_bytes, is_fp8_param = 0, is_fp8_parameter(settings, plan)
        if plan.precision == "fp8":
            both = not is_fp8_param and stores_both(settings)
            weight_bytes = stored_weight(plan, n, k, both_contiguous=both)
        if not is_fp8_param:
            weight_bytes += size * n * k
        yield SiteSpeedup(
            linear,
            plan.reported_precision,
            plan.reason,
            tuple(gemm_times(settings, linear, device)),
            linear_input(settings, linear.site, k, rows) * linear.count,
            size * rows * k * linear.count,
            weight_bytes * linear.count,
            size * n * k * linear.count,
        )


@dataclass(frozen=True)
class SiteGroup:
    """Sites that differ by layer only; no layers for the output projection."""

    name: str
    layers: tuple[int, ...]
    site: SiteSpeedup


def group_sites(sites: Iterable[SiteSpeedup]) -> list[SiteGroup]:
    """Groups sites by name without the layer, if they run alike."""
    found: dict[Any, list[SiteSpeedup]] = {}
    for site in sites:
        name = re.sub(r"^decoder\.layers\.\d+\.", "", site.linear.site)
        key = replace(site, linear=replace(site.linear, site=name, layer=0))
        found.setdefault((name, key), []).append(site)
    return [
        SiteGroup(name, tuple(layer for site in sites if (layer := site.linear.layer) is not None), sites[0])
        for (name, _), sites in found.items()
    ]


def fp4_note(model: Model, device: Device) -> tuple[str, ...]:
    """A note if the run has GEMMs in NVFP4 and the device has no peak for them."""
    fp4 = quantizes(model) and "nvfp4" in (recipe_name_of(model), *model.fp8_overrides.values())
    return (f"GEMMs in NVFP4 are timed as FP8: {device.name} has no peak of FP4",) * (
        fp4 and device.fp4 is None
    )
