"""The precision plan: precision and reason of every GEMM site, made with the model.

A site is one linear layer, named by its fully qualified module name. Its SitePlan is frozen. All that changes the
precision (first and last layers in BF16, overrides by name, ``fp8_wgrad=False``, a role left in high precision) is
applied when the plan is made, which records the reason. Nothing else decides precision, so the report cannot disagree
with what runs; only precision_schedule.py says in which iterations a plan applies.

Rejected: an ambient context that layers query at run time, as Transformer Engine has it. Recompute, pipelines and a
module that is called twice each run under the wrong context, silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..numerics.formats import E2M1
from ..numerics.rule import Rule
from ..recipe import GEMM_OPERANDS, Products, Recipe, recipe_name
from .cast_spec import READERS, CastSpec, CastSpecs, Operands, products_of_casts
from .overrides import named_gemms

Precision = Literal["fp8", "bf16"]

Cause = Literal["asked", "fallback", "size", "guard"]
"""What decided a site's precision: the settings; ``fp8_fallback`` (it cannot run as requested, and the user allowed
BF16); the table of ``fp8_size_filter`` (FP8 is slower there); or ``fp8_guard`` (it became unhealthy). No code depends on
the text of a reason."""


@dataclass(frozen=True)
class SitePlan:
    """One GEMM site's entry.

    Attributes:
        name: fully qualified module name; layer numbers are global, counted from 0.
        layer: global 0-based layer number, None outside the layers.
        precision: 'fp8' if any GEMM runs in FP8 or FP4, else 'bf16' (the model's own dtype).
        recipe: of all parts of the site without an override; None for a bf16 site.
        backend: backend name, None for a bf16 site.
        reason: why, as text.
        cause: what decided it.
        operands: casts of each GEMM. If only one operand of a GEMM is quantized, because the other's role is not, it
            is dequantized for the product. A GEMM that was taken out of FP8 quantizes neither.
        rules: role -> the Rule of its first reader that has one, or None for a role that stays in high precision.
        gemms: 'fprop', 'dgrad', 'wgrad' -> precision.
    """

    name: str
    layer: int | None
    precision: Precision
    recipe: Recipe | None
    backend: str | None
    reason: str
    operands: Operands
    cause: Cause = "asked"
    rules: Mapping[str, Rule | None] = field(init=False)
    gemms: Mapping[str, Precision] = field(init=False)

    def __post_init__(self) -> None:
        gemms = {gemm: "bf16" if None in casts.values() else "fp8" for gemm, casts in self.operands.items()}
        rules = {}
        for role, readers in READERS.items():
            casts = [self.operands[gemm][role] for gemm in readers]
            rules[role] = next((cast.rule for cast in casts if cast is not None), None)
        object.__setattr__(self, "gemms", gemms)
        object.__setattr__(self, "rules", rules)

    def of(self, name: str, layer: int | None) -> SitePlan:
        """Returns an equal plan for another site."""
        plan = object.__new__(SitePlan)
        vars(plan).update(vars(self), name=name, layer=layer)
        return plan

    @property
    def products(self) -> Products:
        """The rules of each GEMM's two operands."""
        return products_of_casts(self.operands)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for report.json, which distinguish FP4 from FP8."""
        return {
            "name": self.name,
            "layer": self.layer,
            "precision": self.reported_precision,
            "recipe": None if self.recipe is None else recipe_name(self.recipe),
            "backend": self.backend,
            "roles": {role: self._in_words(role) for role in READERS},
            "gemms": self.reported_gemms,
            "reason": self.reason,
        }

    @property
    def reported_gemms(self) -> dict[str, str]:
        """GEMM -> its precision for reports: 'fp4' if an operand has 4-bit codes, else as ``gemms``."""
        pairs = self.products.items()
        fp4 = {gemm for gemm, pair in pairs if all(pair) and E2M1 in (rule.fmt for rule in pair if rule)}
        return {gemm: "fp4" if gemm in fp4 else precision for gemm, precision in self.gemms.items()}

    @property
    def reported_precision(self) -> str:
        """The site's precision for reports: 'fp4' if any GEMM is, else as ``precision``."""
        return "fp4" if "fp4" in self.reported_gemms.values() else self.precision

    def _in_words(self, role: str) -> str | None:
        """Describes how a role is quantized, over the GEMMs that quantize anything."""
        words = {
            gemm: "high precision" if (cast := self.operands[gemm][role]) is None else str(cast.rule)
            for gemm in READERS[role]
            if any(self.operands[gemm].values())
        }
        if len(set(words.values())) > 1:
            return ", ".join(f"{what} in {gemm}" for gemm, what in words.items())
        rule = self.rules[role]
        return None if rule is None else str(rule)


def fp8_site(
    name: str,
    layer: int | None,
    recipe: Recipe,
    backend: str,
    reason: str,
    *,
    fp8_wgrad: bool = True,
    unquantized: tuple[str, ...] = (),
) -> SitePlan:
    """Returns the plan of a site that runs in FP8 by ``recipe``, except for GEMMs with an unquantized operand."""
    return planned_site(
        name, layer, backend, reason, CastSpecs.of(recipe, fp8_wgrad=fp8_wgrad, unquantized=unquantized)
    )


def planned_site(name: str, layer: int | None, backend: str, reason: str, specs: CastSpecs) -> SitePlan:
    """Returns the plan of a site with these specs.

    If no GEMM is left in FP8, it is a bf16 site and quantizes nothing.
    """
    reason = "; ".join([reason, *specs.remarks()])
    operands = specs.operands()
    if all(None in casts.values() for casts in operands.values()):
        return bf16_site(name, layer, reason)
    return SitePlan(name, layer, "fp8", specs.recipe, backend, reason, operands)


def bf16_site(name: str, layer: int | None, reason: str, cause: Cause = "asked") -> SitePlan:
    """Returns the plan of a site that runs in the model's own dtype."""
    nothing: Operands = {gemm: dict.fromkeys(roles) for gemm, roles in GEMM_OPERANDS.items()}
    return SitePlan(name, layer, "bf16", None, None, reason, nothing, cause)


def healing_plan(plan: SitePlan, parts: Sequence[str], also: Iterable[str] = ()) -> SitePlan:
    """Returns the plan of a site in a healing phase: without the GEMMs that ``parts`` name, without any if that is ().

    What is left casts its operands as before, dgrad the weight too, though fprop now reads the weight itself: in
    published NVFP4 runs this closes most of the gap to BF16 (arXiv 2509.25149).

    Args:
        also: other names of the site that ``parts`` may match.
    """
    gemms = named_gemms((plan.name, *also), parts) if parts else frozenset(GEMM_OPERANDS)
    if not any(plan.gemms[gemm] == "fp8" for gemm in gemms):
        return plan
    operands = {
        gemm: dict.fromkeys(casts) if gemm in gemms else casts for gemm, casts in plan.operands.items()
    }
    if all(None in casts.values() for casts in operands.values()):
        return bf16_site(plan.name, plan.layer, "healing")
    return replace(plan, operands=operands)


def has_fp8_site(plans: Iterable[tuple[Precision, Cause, str]]) -> bool:
    """Whether one of these sites runs in FP8, or was allowed to fall back."""
    return any(precision == "fp8" or cause == "fallback" for precision, cause, _ in plans)


def check_fp8_site(plans: Iterable[tuple[Precision, Cause, str]]) -> None:
    """Raises ValueError if FP8 was requested and no site runs in it, unless a fallback was allowed.

    Args:
        plans: (precision, cause, reason) of every site of the whole model. A model without sites is accepted.
    """
    plans = list(plans)
    if not plans or has_fp8_site(plans):
        return
    reasons = list(dict.fromkeys(reason for _, _, reason in plans))
    more = ", ..." if len(reasons) > 3 else ""
    raise ValueError(
        f"the settings leave none of {len(plans)} GEMM sites in FP8 ({', '.join(reasons[:3])}{more}): change them, or"
        " set fp8=None to train in BF16."
    )


def has_token_scales(rule: Rule) -> bool:
    """Whether no two tokens share a scale, so that a token can be sent with its own scales."""
    return rule.granularity.rows == 1 and rule.scale != "e4m3"


def scale_group(rule: Rule) -> str:
    """Names the largest group of elements that share a scale of this rule: NVFP4 has a second one a tensor."""
    return "tensor" if rule.scale == "e4m3" else str(rule.granularity)


def dispatch_cast(plans: Sequence[SitePlan], role: str) -> tuple[CastSpec | None, str | None]:
    """Returns how tokens are quantized before they are sent to the linears of these plans, or None and the reason.

    Args:
        role: 'input' for the experts' first linears, 'grad_output' for the gradients of their second ones.
    """
    first = plans[0].operands[READERS[role][0]][role]
    rule = None if first is None else first.rule
    for plan in plans:
        if (why := refusal(plan, role, rule)) is not None:
            return None, why
    return first, None


def refusal(plan: SitePlan, role: str, rule: Rule | None) -> str | None:
    """Returns why a linear of this plan cannot receive an operand in codes by this rule; None if it can."""
    (reader, wgrad), (one, other) = READERS[role], (plan.operands[gemm][role] for gemm in READERS[role])
    if plan.precision != "fp8":
        return f"{plan.name} is in high precision"
    if one is None or rule is None:
        return f"{reader} of {plan.name} reads its {role} in high precision"
    if other is None:
        return f"{wgrad} of {plan.name} reads its {role} in high precision"
    if one.rule != rule:
        return f"{plan.name} reads {one.rule}, and other experts {rule}"
    return (
        None
        if has_token_scales(rule)
        else f"{plan.name} has a scale per {scale_group(rule)}, which is not sent with a token"
    )
