"""Operands of a linear's GEMMs: the quantization of each, or none.

Two GEMMs read each operand, each in its own direction. If both need the same quantization, one cast serves both; if
not, the operand is cast twice, each time from high precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..numerics.formats import E2M1, E4M3, E5M2, ROLES, FloatFormat, Format
from ..numerics.rule import Rule
from ..recipe import GEMM_OPERANDS, DelayedScaling, Products, Recipe, is_transformed, untransformed
from .overrides import Override

READERS = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
"""The GEMMs that read each operand: one its rowwise side, the other its columnwise side."""


@dataclass(frozen=True)
class CastSpec:
    """The quantization of an operand for one GEMM: its rule, and the recipe with the history of a delayed one."""

    rule: Rule
    delayed: DelayedScaling | None = None

    @staticmethod
    def of(rule: Rule, recipe: Recipe) -> CastSpec:
        """Makes the cast for a rule of this recipe."""
        return CastSpec(rule, recipe if rule.delayed and isinstance(recipe, DelayedScaling) else None)

    def untransformed(self) -> CastSpec:
        """The same without the Hadamard transform."""
        rule = untransformed(self.rule)
        return self if rule is self.rule or rule is None else replace(self, rule=rule)


Operands = Mapping[str, Mapping[str, CastSpec | None]]
"""GEMM -> role -> the operand's cast; None: not quantized."""


@dataclass(frozen=True)
class _Operand:
    """One operand of one GEMM: its recipe, a format that replaces the recipe's, or why it is not quantized."""

    recipe: Recipe
    fmt: str | None = None
    plain: str | None = None

    def spec(self, role: str) -> CastSpec | None:
        rule = None if self.plain else self.recipe.role_rules[role]
        if rule is None:
            return None
        if self.fmt is not None:
            rule = replace(rule, fmt=_format(self.fmt, role))
        return CastSpec.of(rule, self.recipe)


def _format(name: str, role: str) -> FloatFormat:
    return {"e4m3": E4M3, "e5m2": E5M2, "hybrid": Format.HYBRID.for_role(role)}[name]


class CastSpecs:
    """The operands of a linear's GEMMs, while overrides are applied.

    Args:
        recipe: of all linears.
        reason: why this recipe, for the report.
        unquantized: roles that stay in high precision.
        fp8_wgrad: False keeps wgrad in high precision.
        bf16_reason: why the whole linear stays in high precision, if it does.

    Attributes:
        overridden: whether an override matches the linear.
        edited: whether one changed it from what its recipe says.
    """

    def __init__(
        self,
        recipe: Recipe,
        reason: str = "",
        *,
        unquantized: tuple[str, ...] = (),
        fp8_wgrad: bool = True,
        bf16_reason: str | None = None,
    ):
        self.unquantized, self.fp8_wgrad = unquantized, fp8_wgrad
        self.overridden = False
        self._plain: set[str] = set()  # GEMMs whose operands are never quantized
        self._reset(recipe, reason)
        if bf16_reason is not None:
            self._plain, self._reasons = set(GEMM_OPERANDS), [(bf16_reason, "")]

    def _reset(self, recipe: Recipe, reason: str) -> None:
        """Sets this recipe for all GEMMs."""
        self.recipe, self.edited = recipe, False
        self._plain = set()
        self._reasons = [(reason, "")]  # (text, part of the linear)
        self._wgrad_off = not self.fp8_wgrad  # wgrad, by fp8_wgrad=False
        self._operands = {
            (gemm, role): _Operand(recipe, plain="as asked" if role in self.unquantized else None)
            for gemm, roles in GEMM_OPERANDS.items()
            for role in roles
        }

    def apply(self, override: Override, recipe: Recipe | None, setting: str) -> None:
        """Applies an override.

        Args:
            recipe: the recipe that it names, or None.
            setting: the config field, for the report.

        ValueError: it gives a format to an operand that its recipe does not quantize, or quantizes as NVFP4.
        """
        self.overridden = True
        value, of_role = override.value, override.part in ROLES
        if not override.part and (recipe is not None or value == "bf16"):
            self._reset(recipe or self.recipe, f"{setting} {override.key!r}")
            self._plain = set() if recipe is not None else set(GEMM_OPERANDS)
            return
        if value == "bf16" and not of_role and self._plain.issuperset(override.gemms):
            return
        named = type(value).__name__ if isinstance(value, Recipe) else value
        self._reasons.append((f"{setting} {override.key!r}: {named}", override.part))
        self.edited = True
        if value == "bf16" and not of_role:
            self._plain.update(override.gemms)
            return
        if not of_role:
            self._plain.difference_update(override.gemms)
            self._wgrad_off = self._wgrad_off and "wgrad" not in override.gemms
        for (gemm, role), operand in self._operands.items():
            if gemm in override.gemms and override.covers(role):
                if value == "bf16":
                    self._operands[gemm, role] = replace(operand, plain="by name")
                elif recipe is not None:
                    self._operands[gemm, role] = _Operand(recipe)
                elif (rule := operand.recipe.role_rules[role]) is not None and rule.fmt is E2M1:
                    raise ValueError(
                        f"{setting} {override.key!r}: {value!r} is a format, and NVFP4 has its own: name a recipe,"
                        " such as 'mxfp8'"
                    )
                elif rule is None:
                    raise ValueError(
                        f"{setting} {override.key!r}: {value!r} is a format, and the recipe does not quantize {role}:"
                        " name a recipe"
                    )
                else:
                    self._operands[gemm, role] = replace(operand, fmt=value, plain=None)

    @property
    def reasons(self) -> list[str]:
        """The reasons for the report, without those for operands that no FP8 GEMM reads."""
        return [
            text
            for text, part in self._reasons
            if text and not self._plain.issuperset(READERS.get(part, {""}))
        ]

    def operands(self) -> Operands:
        """Returns GEMM -> role -> cast."""
        result: dict[str, dict[str, CastSpec | None]] = {
            gemm: {
                role: None if gemm in self._plain else self._operands[gemm, role].spec(role) for role in roles
            }
            for gemm, roles in GEMM_OPERANDS.items()
        }
        if self._leaves_wgrad(result):
            result["wgrad"] = dict.fromkeys(GEMM_OPERANDS["wgrad"])
        if is_transformed(None if cast is None else cast.rule for cast in result["wgrad"].values()):
            return result
        return {
            gemm: {role: None if cast is None else cast.untransformed() for role, cast in casts.items()}
            for gemm, casts in result.items()
        }

    def products(self) -> Products:
        """Returns the same as rules, in the form that backends take."""
        rules = {
            gemm: [None if cast is None else cast.rule for cast in casts.values()]
            for gemm, casts in self.operands().items()
        }
        return {gemm: (first, second) for gemm, (first, second) in rules.items()}

    @property
    def none_in_fp8(self) -> bool:
        """Whether every GEMM was taken out of FP8."""
        return self._plain.issuperset(GEMM_OPERANDS)

    def _leaves_wgrad(self, operands: Operands) -> bool:
        """Whether fp8_wgrad=False takes wgrad out of FP8, where it would otherwise run."""
        return self._wgrad_off and "wgrad" not in self._plain and None not in operands["wgrad"].values()

    def remarks(self) -> list[str]:
        """Returns, for the report, what stays in high precision without an override."""
        found = []
        for cause in ("by the recipe", "as asked"):
            roles = [role for role in ROLES if self._causes(role) == {cause}]
            if roles:
                found.append(f"{', '.join(roles)} not quantized {cause}")
        all_casts = {
            gemm: {role: self._operands[gemm, role].spec(role) for role in roles}
            for gemm, roles in GEMM_OPERANDS.items()
        }
        if self._leaves_wgrad(all_casts):
            found.append("fp8_wgrad=False: wgrad in high precision, which saves the input unquantized")
        return found

    def _causes(self, role: str) -> set[str | None]:
        return {
            operand.plain or ("by the recipe" if operand.recipe.role_rules[role] is None else None)
            for (_, operand_role), operand in self._operands.items()
            if operand_role == role
        }
