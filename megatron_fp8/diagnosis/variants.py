"""Variants of a model: which sites, GEMMs and operands are quantized.

A variant is an immutable value, independent of a model. ``use_variant`` replaces the sites by simulated ones
during a run.

What a simulated site leaves in FP8 is cast by the very quantizers of the real one, with its delayed scales, and
multiplied by it: whatever is wrong there shows. The weight is cached apart, and random bits are those of the site's
first backward of the iteration. An operand that is not quantized can be rounded in place of it, to as many significant
bits as a format has, with no limit to its exponent: a format at its best, whatever the scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch

from ..kernels.gemms import matmul_high_precision
from ..linear.gemm_site import GemmSite, in_high_precision
from ..numerics.formats import ROLES
from ..plan.site_plan import SitePlan
from ..recipe import GEMM_OPERANDS
from ..tensor import Operand

Cell = tuple[str, str]
"""One operand of one GEMM: ('dgrad', 'weight')."""

BF16_BITS = 8
"""Significant bits of bfloat16, including the hidden one."""


@dataclass(frozen=True)
class Part:
    """A site, one of its GEMMs, or one of its operands."""

    site: str
    gemm: str | None = None
    role: str | None = None

    @property
    def key(self) -> str:
        """Its key in overrides: NAME, NAME:dgrad, NAME:weight."""
        part = self.gemm or self.role
        return f"{self.site}:{part}" if part else self.site

    def cells(self, plan: SitePlan) -> frozenset[Cell]:
        """Its operands that the plan quantizes."""
        return frozenset(
            (gemm, role)
            for gemm, role in planned_cells(plan)
            if self.gemm in (None, gemm) and self.role in (None, role)
        )

    def parts(self, plan: SitePlan) -> list[Part]:
        """Its GEMMs and operands in FP8."""
        gemms_and_roles = [Part(self.site, gemm=gemm) for gemm in GEMM_OPERANDS]
        gemms_and_roles += [Part(self.site, role=role) for role in ROLES]
        return [part for part in gemms_and_roles if part.cells(plan)]


def planned_cells(plan: SitePlan) -> frozenset[Cell]:
    """The operands that a plan quantizes."""
    return frozenset(
        (gemm, role)
        for gemm, casts in plan.operands.items()
        for role, cast in casts.items()
        if cast is not None
    )


@dataclass(frozen=True)
class Variant:
    """What runs in which precision. Sites that are not named run in high precision.

    Attributes:
        name: a label.
        quantized: site -> operands that are quantized.
        rounded: site -> operand -> significant bits to round to, instead of quantizing.
        planned: site -> this rank's site with another plan, which quantizes in place of the model's own; None: no rank
            has one. Else the name must be unique: it is the cache key.
    """

    name: str
    quantized: Mapping[str, frozenset[Cell]] = field(default_factory=dict)
    rounded: Mapping[str, Mapping[Cell, int]] = field(default_factory=dict)
    planned: Mapping[str, GemmSite] | None = None

    @property
    def key(self) -> str:
        """Cache key: the same string for equal variants, and the same on all ranks."""
        if self.planned is not None:  # a rank may hold none of these sites
            return self.name
        quantized = {site: sorted(cells) for site, cells in self.quantized.items() if cells}
        rounded = {site: sorted(bits.items()) for site, bits in self.rounded.items() if bits}
        return repr((sorted(quantized.items()), sorted(rounded.items())))


class Variants:
    """The variants of one model. ``plans``: site -> plan, for sites with FP8 GEMMs."""

    high_precision = Variant("high precision")

    def __init__(self, plans: Mapping[str, SitePlan]):
        self.plans = plans

    @property
    def planned(self) -> Variant:
        """Every site as planned."""
        return Variant("as planned", {name: planned_cells(plan) for name, plan in self.plans.items()})

    def alone(self, name: str, parts: Iterable[Part]) -> Variant:
        """These parts as planned, everything else in high precision."""
        return Variant(name, self._cells(parts))

    def at_best(self, name: str, parts: Iterable[Part]) -> Variant:
        """These parts rounded to the significant bits of their formats, everything else in high precision."""
        bits = {}
        for site, cells in self._cells(parts).items():
            operands = self.plans[site].operands
            bits[site] = {
                (gemm, role): cast.rule.fmt.mantissa_bits + 1
                for gemm, role in cells
                if (cast := operands[gemm][role]) is not None
            }
        return Variant(f"{name}, rounded", rounded=bits)

    @property
    def bf16(self) -> Variant:
        """All operands planned in FP8, rounded to BF16 instead."""
        bits = {name: dict.fromkeys(planned_cells(plan), BF16_BITS) for name, plan in self.plans.items()}
        return Variant("rounded to BF16", rounded=bits)

    def without(self, parts: Iterable[Part]) -> Variant:
        """As planned, with these parts in high precision: the effect of overrides to 'bf16'."""
        parts = list(parts)
        removed = self._cells(parts)
        quantized = {}
        for name, plan in self.plans.items():
            cells = planned_cells(plan) - removed.get(name, frozenset())
            # A site without a GEMM with two FP8 operands quantizes nothing (plan/site_plan.py).
            pairs = [all((gemm, role) in cells for role in roles) for gemm, roles in GEMM_OPERANDS.items()]
            quantized[name] = cells if any(pairs) else frozenset()
        return Variant(f"without {', '.join(part.key for part in parts)}", quantized)

    def _cells(self, parts: Iterable[Part]) -> dict[str, frozenset[Cell]]:
        found: dict[str, frozenset[Cell]] = {}
        for part in parts:
            found[part.site] = found.get(part.site, frozenset()) | part.cells(self.plans[part.site])
        return found


@contextmanager
def use_variant(variant: Variant, sites: Mapping[str, GemmSite]) -> Iterator[dict[str, SimulatedSite]]:
    """Context: these sites run this variant. New simulated sites each time, so no state carries over."""
    nothing: Set[Cell] = frozenset()
    simulated = {
        name: SimulatedSite(
            (variant.planned or {}).get(name, site),
            variant.quantized.get(name, nothing),
            variant.rounded.get(name, {}),
        )
        for name, site in sites.items()
    }
    with ExitStack() as stack:
        for name, site in sites.items():
            stack.enter_context(site.replaced_by(simulated[name]))
        yield simulated


class SimulatedSite(GemmSite):
    """``site.replaced_by(SimulatedSite(site, ...))`` runs it in the site's place.

    Args:
        site: whose quantizers, products and random numbers it uses.
        quantized: the operands to quantize, among those that the site's plan quantizes. A GEMM with only one of them runs
            in high precision, and that one is dequantized.
        rounded: operands to round instead, each with its number of significant bits.

    Without any, the layer runs in high precision, as one that the plan keeps there.

    ``flops``: FLOPs so far of its fprop in high precision; dgrad and wgrad have as many each.
    """

    def __init__(self, site: GemmSite, quantized: Set[Cell], rounded: Mapping[Cell, int]):
        operands = {
            gemm: {role: cast if (gemm, role) in quantized else None for role, cast in casts.items()}
            for gemm, casts in site.plan.operands.items()
        }
        plan = replace(site.plan, operands=operands, precision="fp8" if quantized or rounded else "bf16")
        super().__init__(plan, site.state, None, of=site)
        self._site, self._rounded, self.flops = site, dict(rounded), 0
        self.heals = site.heals

    def multiply(
        self,
        gemm: str,
        a: Operand,
        b: Operand,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        *,
        record: bool = True,
    ) -> torch.Tensor:
        """As the site does where both are quantized."""
        if self.plan.gemms[gemm] == "fp8":
            return self._site.multiply(gemm, a, b, out_dtype, bias, record=record)
        operands = [
            round_significand(operand, self._rounded[gemm, role])
            if (gemm, role) in self._rounded and isinstance(operand, torch.Tensor)
            else operand
            for role, operand in zip(GEMM_OPERANDS[gemm], (a, b), strict=True)
        ]
        self.state.counts.hp_gemms += 1
        if gemm == "fprop" and record and isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            self.flops += 2 * a.numel() * b.shape[0]
        if operands[0] is a and operands[1] is b:
            return matmul_high_precision(*in_high_precision(a, b), out_dtype, bias)
        first, second = (x if isinstance(x, torch.Tensor) else x.dequantize(torch.float32) for x in operands)
        return matmul_high_precision(first.to(torch.float32), second.to(torch.float32), out_dtype, bias)


def round_significand(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x, of any shape and floating dtype, as float32 with so many significant bits, to nearest even, at any exponent. NaN
    and Inf stay.

    x is scaled by 4/3 on the way there and back, so that values which have no more bits than that are rounded too: to
    round BF16 values to BF16 again shows what one such rounding does.
    """
    scaled = x.to(torch.float32) * (4 / 3)
    mantissa, exponent = torch.frexp(scaled)
    rounded = torch.ldexp((mantissa * 2.0**bits).round() * 2.0**-bits, exponent) * 0.75
    return torch.where(x.isfinite(), rounded, x.to(torch.float32))
