"""FP8 gain of each GEMM site, in bytes and roofline time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from .attention import gathers_input
from .estimate import keeps_both
from .iteration_time import GemmTime, Linear, gemm_times, linears, output_linear
from .peaks import Device
from .saved_tensors import kept_rule
from .settings import Settings
from .sites import Plans, lives_as_fp8, side_scales, stored_weight


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


def of_sites(settings: Settings, plans: Plans, device: Device, *, gpu: bool = True) -> Iterator[SiteSpeedup]:
    """All sites of the model by layer, plus the output projection with fp8_output_layer.

    ``gpu``: bytes with the native backend.
    """
    model, size = settings.model, settings.model.activation_bytes
    sites = [linear for layer in (*model.layers, *model.predicting) for linear in linears(settings, layer)]
    if model.fp8_output_layer:
        sites.append(output_linear(settings))
    for linear in sites:
        plan = plans.of(linear.site, linear.layer)
        rows = linear.tokens // (model.token_share if gathers_input(linear.site) else 1)
        values, weight = rows * linear.k * linear.count, linear.n * linear.k * linear.count
        rule = kept_rule(settings, plans, linear.site, linear.layer, rows)
        input_bytes = size * values
        if rule is not None:
            input_bytes = values + side_scales(rule, linear.k, rows) * linear.count
        codes, is_fp8_param = 0, lives_as_fp8(settings, plan)
        if plan.precision == "fp8":
            both_contiguous = not is_fp8_param and keeps_both(settings, gpu=gpu)
            codes = (
                stored_weight(plan, linear.n, linear.k, both_contiguous=both_contiguous).total * linear.count
            )
        yield SiteSpeedup(
            linear,
            plan.precision,
            plan.reason,
            tuple(gemm_times(settings, linear, plans, device)),
            input_bytes,
            size * values,
            codes + (0 if is_fp8_param else size * weight),
            size * weight,
        )


@dataclass(frozen=True)
class SiteGroup:
    """Sites that differ by layer only; no layers for the output projection."""

    name: str
    layers: tuple[int, ...]
    site: SiteSpeedup


def grouped(sites: Iterator[SiteSpeedup]) -> list[SiteGroup]:
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
