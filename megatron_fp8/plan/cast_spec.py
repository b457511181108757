"""Operands of a linear's GEMMs: the quantization of each, or none.

Two GEMMs read each operand, each in its own direction. If both need the same quantization, one cast serves both; if
not, the operand is cast twice, each time from high precision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..numerics.formats import E2M1, E4M3, E5M2, ROLES, FloatFormat, Format
from ..numerics.rule import Rule
from ..recipe import (
    GEMM_OPERANDS,
    DelayedScaling,
    Products,
    Recipe,
    is_transformed,
    recipe_name,
    without_transform,
)
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
        rule = without_transform(self.rule)
        return self if rule is self.rule or rule is None else replace(self, rule=rule)


Operands = Mapping[str, Mapping[str, CastSpec | None]]
"""GEMM -> role -> the operand's cast; None: not quantized."""


def products_of_casts(operands: Operands) -> Products:
    """Returns the rules of each GEMM's two operands, in the form that backends take."""
    rules = {
        gemm: {role: None if cast is None else cast.rule for role, cast in casts.items()}
        for gemm, casts in operands.items()
    }
    return {gemm: (rules[gemm][a], rules[gemm][b]) for gemm, (a, b) in GEMM_OPERANDS.items()}


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

    def after(self, role: str, value: Any, recipe: Recipe | None, text: str) -> _Operand:
        """Returns the operand after an override's value; arguments and errors as of ``CastSpecs.after``."""
        if value == "bf16":
            return replace(self, plain="by name")
        if recipe is not None:
            return _Operand(recipe)
        rule = self.recipe.role_rules[role]
        if rule is not None and rule.fmt is not E2M1:
            return replace(self, fmt=value, plain=None)
        if rule is None:
            reason = f"the recipe does not quantize {role}: name a recipe"
        else:
            reason = "NVFP4 has its own: name a recipe, such as 'mxfp8'"
        raise ValueError(f"{text}: {value!r} is a format, and {reason}")


def _format(name: str, role: str) -> FloatFormat:
    return {"e4m3": E4M3, "e5m2": E5M2, "hybrid": Format.HYBRID.for_role(role)}[name]


@dataclass(frozen=True, eq=False)
class CastSpecs:
    """The operands of a linear's GEMMs. Immutable: ``after`` returns them with one more override.

    Attributes:
        recipe: of all parts without an override of their own.
        unquantized: roles that stay in high precision.
        fp8_wgrad: False keeps wgrad in high precision.
        texts: (text, part of the linear) of each reason.
        table: (GEMM, role) -> operand.
        off: GEMMs whose operands are never quantized.
        wgrad_off: fp8_wgrad=False still applies.
        overridden: whether an override matches the linear.
    """

    recipe: Recipe
    unquantized: tuple[str, ...]
    fp8_wgrad: bool
    texts: tuple[tuple[str, str], ...]
    table: Mapping[tuple[str, str], _Operand]
    off: frozenset[str]
    wgrad_off: bool
    overridden: bool = False

    @staticmethod
    def of(
        recipe: Recipe,
        reason: str = "",
        *,
        unquantized: tuple[str, ...] = (),
        fp8_wgrad: bool = True,
        bf16_reason: str | None = None,
    ) -> CastSpecs:
        """The operands without overrides. ``bf16_reason``: why the whole linear stays in high precision, if it does."""
        table = {
            (gemm, role): _Operand(recipe, plain="as asked" if role in unquantized else None)
            for gemm, roles in GEMM_OPERANDS.items()
            for role in roles
        }
        texts = ((reason if bf16_reason is None else bf16_reason, ""),)
        off = frozenset(() if bf16_reason is None else GEMM_OPERANDS)
        return CastSpecs(recipe, unquantized, fp8_wgrad, texts, table, off, wgrad_off=not fp8_wgrad)

    def after(self, override: Override, recipe: Recipe | None, setting: str) -> CastSpecs:
        """Returns the operands with an override.

        Args:
            recipe: the recipe that it names, or None.
            setting: the config field, for the report.

        ValueError: it gives a format to an operand that its recipe does not quantize, or quantizes as NVFP4.
        """
        value, gemms, of_role = override.value, override.gemms, override.part in ROLES
        text, is_off = f"{setting} {override.key!r}", value == "bf16" and not of_role
        if not override.part and (is_off or recipe is not None):
            fresh = CastSpecs.of(
                recipe or self.recipe,
                text,
                unquantized=self.unquantized,
                fp8_wgrad=self.fp8_wgrad,
                bf16_reason=text if is_off else None,
            )
            return replace(fresh, overridden=True)
        if is_off and self.off.issuperset(gemms):
            return replace(self, overridden=True)
        named = type(value).__name__ if isinstance(value, Recipe) else value
        specs = replace(self, texts=(*self.texts, (f"{text}: {named}", override.part)), overridden=True)
        if is_off:
            return replace(specs, off=self.off.union(gemms))
        table = {
            (gemm, role): operand.after(role, value, recipe, text)
            if gemm in gemms and override.covers(role)
            else operand
            for (gemm, role), operand in self.table.items()
        }
        if of_role:
            return replace(specs, table=table)
        wgrad_off = self.wgrad_off and "wgrad" not in gemms
        return replace(specs, table=table, off=self.off.difference(gemms), wgrad_off=wgrad_off)

    @property
    def edited(self) -> bool:
        """Whether an override changed the linear from what its recipe says."""
        return len(self.texts) > 1

    @property
    def reasons(self) -> list[str]:
        """The reasons for the report, without those for operands that no FP8 GEMM reads."""
        return [
            text for text, part in self.texts if text and not self.off.issuperset(READERS.get(part, {""}))
        ]

    def _casts(self, off: Collection[str] = ()) -> dict[str, dict[str, CastSpec | None]]:
        """GEMM -> role -> cast, without fp8_wgrad and the rules for transforms. ``off``: GEMMs that quantize nothing."""
        return {
            gemm: {role: None if gemm in off else self.table[gemm, role].spec(role) for role in roles}
            for gemm, roles in GEMM_OPERANDS.items()
        }

    def operands(self) -> Operands:
        """Returns GEMM -> role -> cast."""
        result = self._casts(self.off)
        if self._leaves_wgrad(result):
            result["wgrad"] = dict.fromkeys(GEMM_OPERANDS["wgrad"])
        if is_transformed(None if cast is None else cast.rule for cast in result["wgrad"].values()):
            return result
        return {
            gemm: {role: None if cast is None else cast.untransformed() for role, cast in casts.items()}
            for gemm, casts in result.items()
        }

    def recipe_names(self) -> dict[str, str | None]:
        """Returns GEMM -> the names of its operands' recipes, None for a GEMM in high precision."""
        names = {
            gemm: {recipe_name(self.table[gemm, role].recipe) for role in roles}
            for gemm, roles in GEMM_OPERANDS.items()
        }
        operands = self.operands()
        return {
            gemm: None if None in operands[gemm].values() else " and ".join(sorted(found))
            for gemm, found in names.items()
        }

    @property
    def none_in_fp8(self) -> bool:
        """Whether every GEMM was taken out of FP8."""
        return self.off.issuperset(GEMM_OPERANDS)

    def _leaves_wgrad(self, operands: Operands) -> bool:
        """Whether fp8_wgrad=False takes wgrad out of FP8, where it would otherwise run."""
        return self.wgrad_off and "wgrad" not in self.off and None not in operands["wgrad"].values()

    def remarks(self) -> list[str]:
        """Returns, for the report, what stays in high precision without an override."""
        found = []
        for cause in ("by the recipe", "as asked"):
            roles = [role for role in ROLES if self._causes(role) == {cause}]
            if roles:
                found.append(f"{', '.join(roles)} not quantized {cause}")
        if self._leaves_wgrad(self._casts()):
            found.append("fp8_wgrad=False: wgrad in high precision, which saves the input unquantized")
        return found

    def _causes(self, role: str) -> set[str | None]:
        return {
            operand.plain or ("by the recipe" if operand.recipe.role_rules[role] is None else None)
            for (_, operand_role), operand in self.table.items()
            if operand_role == role
        }
