"""Variants of a model: which sites, GEMMs and operands are quantised.

A variant is an immutable value, independent of a model. ``installed`` replaces the sites by simulated ones
during a run (linear/simulated_site.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from ..linear.gemm_site import GemmSite
from ..linear.simulated_site import Cell, SimulatedSite
from ..numerics.formats import ROLES
from ..plan.site_plan import SitePlan
from ..recipe import GEMM_OPERANDS

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
        """Its operands that the plan quantises."""
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
    """The operands that a plan quantises."""
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
        quantized: site -> operands that are quantised.
        rounded: site -> operand -> significant bits to round to, instead of quantising.
    """

    name: str
    quantized: Mapping[str, frozenset[Cell]] = field(default_factory=dict)
    rounded: Mapping[str, Mapping[Cell, int]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Cache key: the same string for equal variants."""
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
            # A site without a GEMM with two FP8 operands quantises nothing (plan/site_plan.py).
            pairs = [all((gemm, role) in cells for role in roles) for gemm, roles in GEMM_OPERANDS.items()]
            quantized[name] = cells if any(pairs) else frozenset()
        return Variant(f"without {', '.join(part.key for part in parts)}", quantized)

    def _cells(self, parts: Iterable[Part]) -> dict[str, frozenset[Cell]]:
        found: dict[str, frozenset[Cell]] = {}
        for part in parts:
            found[part.site] = found.get(part.site, frozenset()) | part.cells(self.plans[part.site])
        return found


@contextmanager
def installed(variant: Variant, sites: Mapping[str, GemmSite]) -> Iterator[None]:
    """Context: these sites run this variant. New simulated sites each time, so no state carries over."""
    nothing: Set[Cell] = frozenset()
    with ExitStack() as stack:
        for name, site in sites.items():
            simulated = SimulatedSite(
                site, variant.quantized.get(name, nothing), variant.rounded.get(name, {})
            )
            stack.enter_context(site.replaced_by(simulated))
        yield
