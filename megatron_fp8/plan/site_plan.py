"""The precision plan: for every GEMM site, what runs in which precision, and why. Settled when the model is built.

A site is one linear layer, named by its fully qualified module name. Its SitePlan is frozen; whatever changes the answer
(first and last layers in BF16, overrides by name, ``fp8_wgrad=False``, a role left in high precision) is applied when
the plan is made, and leaves its reason there. Nothing decides precision anywhere else, so the report cannot disagree
with what runs; only phases.py says in which iterations a plan is in force.

Rejected: an ambient context that layers ask "is this FP8?" at run time, as Transformer Engine has it. Recompute,
pipelines and a module called twice each meet the wrong ambient, in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..numerics.rule import Rule
from ..recipe import GEMM_OPERANDS, Products, Recipe, recipe_name
from .operands import READERS, Choices, Operands

Precision = Literal["fp8", "bf16"]

Cause = Literal["asked", "fallback", "size", "guard"]
"""Who decided a site's precision: the settings; ``fp8_fallback`` (it cannot run as asked, and the user allowed BF16); the
table of ``fp8_size_filter`` (FP8 does not pay there); or ``fp8_guard`` (it ran, and fell ill). Reasons are for people:
nothing is decided by their words."""


@dataclass(frozen=True)
class SitePlan:
    """One GEMM site's entry.

    Attributes:
        name: fully qualified module name; layer numbers are global, counted from 0.
        layer: global 0-based layer number, None outside the layers.
        precision: 'fp8' if any GEMM runs in FP8, else 'bf16' (the model's own dtype).
        recipe: of the site, where nothing else was said of a part of it; None for a bf16 site.
        backend: backend name, None for a bf16 site.
        reason: why it is so, in words.
        cause: who decided it.
        operands: what each GEMM multiplies. One of a GEMM's operands alone is quantised where the other's role is not:
            then it is dequantised for the product. A GEMM that was taken out of FP8 has two that never were quantised.
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
        """The same of another site that is alike."""
        made = object.__new__(SitePlan)
        vars(made).update(vars(self), name=name, layer=layer)
        return made

    @property
    def products(self) -> Products:
        """How the operands of each GEMM are quantised."""
        rules = {
            gemm: {role: None if cast is None else cast.rule for role, cast in casts.items()}
            for gemm, casts in self.operands.items()
        }
        return {gemm: (rules[gemm][a], rules[gemm][b]) for gemm, (a, b) in GEMM_OPERANDS.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain values for report.json."""
        return {
            "name": self.name,
            "layer": self.layer,
            "precision": self.precision,
            "recipe": None if self.recipe is None else recipe_name(self.recipe),
            "backend": self.backend,
            "roles": {role: self._in_words(role) for role in READERS},
            "gemms": dict(self.gemms),
            "reason": self.reason,
        }

    def _in_words(self, role: str) -> str | None:
        """How a role is quantised. GEMMs that quantise nothing say so themselves."""
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
    """The plan of a site that runs in FP8 as ``recipe`` says, but for GEMMs with an unquantised operand."""
    return chosen_site(
        name, layer, backend, reason, Choices(recipe, fp8_wgrad=fp8_wgrad, unquantized=unquantized)
    )


def chosen_site(name: str, layer: int | None, backend: str, reason: str, choices: Choices) -> SitePlan:
    """The plan of a site whose GEMMs multiply what was chosen.

    If that leaves no GEMM in FP8 it is a bf16 site, and nothing is quantised.
    """
    reason = "; ".join([reason, *choices.remarks()])
    operands = choices.operands()
    if all(None in casts.values() for casts in operands.values()):
        return bf16_site(name, layer, reason)
    return SitePlan(name, layer, "fp8", choices.recipe, backend, reason, operands)


def bf16_site(name: str, layer: int | None, reason: str, cause: Cause = "asked") -> SitePlan:
    """The plan of a site that runs in the model's own dtype."""
    nothing: Operands = {gemm: dict.fromkeys(roles) for gemm, roles in GEMM_OPERANDS.items()}
    return SitePlan(name, layer, "bf16", None, None, reason, nothing, cause)


def is_something_left(plans: Iterable[tuple[Precision, Cause, str]]) -> bool:
    """Whether one of these sites runs in FP8, or was allowed not to."""
    return any(precision == "fp8" or cause == "fallback" for precision, cause, _ in plans)


def check_something_left(plans: Iterable[tuple[Precision, Cause, str]]) -> None:
    """ValueError if FP8 was asked for and no site runs in it, unless a fallback was allowed.

    ``plans``: (precision, cause, reason) of every site of the whole model; nothing is said of a model without any.
    """
    plans = list(plans)
    if not plans or is_something_left(plans):
        return
    reasons = list(dict.fromkeys(reason for _, _, reason in plans))
    more = ", ..." if len(reasons) > 3 else ""
    raise ValueError(
        f"the settings leave none of {len(plans)} GEMM sites in FP8 ({', '.join(reasons[:3])}{more}): change them, or"
        " set fp8=None to train in BF16."
    )
