"""Recipes: format, granularity and kind of scale of each operand. Frozen data, no state.

A recipe has one method, ``rule(role)``: the quantization of the operand 'input', 'weight' or 'grad_output'. It
returns a Rule (numerics/rule.py), or None for no quantization. Class names and keywords are Transformer Engine's
where it has them.

Everything that changes a number is a field, so two recipes are equal exactly when they quantize alike; equality and
hash are the dataclass's own. The repr omits fields at their defaults, and can be a cache key.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from .numerics.formats import E2M1, E5M2, ROLES, Format, parse_format
from .numerics.rule import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_16X16,
    BLOCK_128X128,
    ROW,
    TENSOR,
    Granularity,
    Rule,
    ScaleKind,
    check_flags,
    short_repr,
)

__all__ = [
    "BLOCK_1X32",
    "BLOCK_1X128",
    "BLOCK_128X128",
    "GEMM_OPERANDS",
    "RECIPES",
    "ROW",
    "TENSOR",
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Granularity",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Products",
    "Recipe",
    "RoleFactory",
    "Rule",
    "ScaleKind",
    "alignment",
    "check_recipe_name",
    "products_of",
    "recipe_name",
    "refuse_e5m2_twice",
]

GEMM_OPERANDS = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}
"""The operands of each GEMM, first and second."""


Products = Mapping[str, tuple[Rule | None, Rule | None]]
"""GEMM -> the rules of its first and its second operand; None: not quantized."""


def products_of(recipe: Recipe | Products) -> Products:
    """Returns the rules of each GEMM of a layer with one recipe; products are returned unchanged."""
    if isinstance(recipe, Mapping):
        return recipe
    rules = {gemm: tuple(recipe.role_rules[role] for role in roles) for gemm, roles in GEMM_OPERANDS.items()}
    if not is_transformed(rules["wgrad"]):
        rules = {gemm: tuple(map(without_transform, pair)) for gemm, pair in rules.items()}
    return {gemm: (first, second) for gemm, (first, second) in rules.items()}


def is_transformed(wgrad: Iterable[Rule | None]) -> bool:
    """Whether both operands of a wgrad have the Hadamard transform: it cancels in their product, and only there."""
    return all(rule is not None and rule.hadamard for rule in wgrad)


def without_transform(rule: Rule | None) -> Rule | None:
    """Returns the rule without the Hadamard transform."""
    return replace(rule, hadamard=False) if rule is not None and rule.hadamard else rule


def refuse_e5m2_twice(products: Products, whose: str) -> None:
    """Raises ValueError if both operands of one GEMM would be E5M2; ``whose`` begins the message."""
    for gemm, (first, second) in products.items():
        if first and second and first.fmt is second.fmt is E5M2:
            a, b = GEMM_OPERANDS[gemm]
            raise ValueError(
                f"{whose}: {gemm} would multiply E5M2 ({a}) by E5M2 ({b}), which no hardware does;"
                " make one of them E4M3"
            )


class Recipe:
    """A recipe: a frozen dataclass with ``rule()``, and an entry of RECIPES with its name. The plan, the backends and
    the configs use nothing else of it: it receives the settings for which it has a field of the same name
    (plan/settings.py).

    Raises:
        ValueError: a flag is not a bool, a rule is invalid, or both operands of one GEMM would be E5M2.
    """

    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        if hasattr(self, "fp8_format"):
            object.__setattr__(self, "fp8_format", parse_format(self.fp8_format))
        check_flags(self, "use_power_2_scales", "use_f32_scales", "stochastic_rounding")
        for role, rule in self.role_rules.items():
            if rule is not None and rule.delayed and not isinstance(self, DelayedScaling):
                raise ValueError(
                    f"{type(self).__name__}: {role} cannot be delayed: delayed scaling needs the DelayedScaling recipe's"
                    " state"
                )
        refuse_e5m2_twice(products_of(self), type(self).__name__)

    def rule(self, role: str) -> Rule | None:
        """Returns the rule of 'input', 'weight' or 'grad_output'; None: it stays in high precision."""
        raise NotImplementedError(f"{type(self).__name__} has no rule(role)")

    @cached_property
    def role_rules(self) -> Mapping[str, Rule | None]:
        """role -> rule(role), computed once: planning a model reads it for each site."""
        return {role: self.rule(role) for role in ROLES}

    def __repr__(self) -> str:
        return short_repr(self)

    def _stochastic(self, role: str) -> bool:
        return self.stochastic_rounding and role == "grad_output"


@dataclass(frozen=True, repr=False)
class DelayedScaling(Recipe):
    """One scale per tensor, from the amaxes of past iterations (Micikevicius et al., arXiv 2209.05433).

    Args:
        margin: powers of two of headroom.
        fp8_format: Format.HYBRID (default) or Format.E4M3.
        amax_history_len: iterations in the history (Transformer Engine's default; Megatron-Core's is 1).
        amax_compute_algo: 'max' of the history, or 'most_recent'.
        interval: the scale is recomputed every interval-th iteration; the history rolls every iteration.
        amax_epsilon: lower bound of amax.
        stochastic_rounding: for grad_output.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    interval: int = 1
    amax_epsilon: float = 0.0
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        for name in ("amax_history_len", "interval"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"DelayedScaling {name} {value!r}: a whole number >= 1 is needed")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"amax_compute_algo {self.amax_compute_algo!r} is unknown: use 'max' or 'most_recent'"
            )
        super().__post_init__()

    def rule(self, role: str) -> Rule:
        """Per-tensor fp32 scale. Without state (a single tensor) it scales as Float8CurrentScaling does."""
        return Rule(
            self.fp8_format.for_role(role),
            TENSOR,
            margin=self.margin,
            epsilon=self.amax_epsilon,
            delayed=True,
            stochastic=self._stochastic(role),
        )


@dataclass(frozen=True, repr=False)
class Float8CurrentScaling(Recipe):
    """One scale per tensor, from the amax of the tensor itself ('tensorwise').

    ``use_power_2_scales`` rounds every scale down to a power of two, in all three roles.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_epsilon: float = 0.0
    stochastic_rounding: bool = False

    def rule(self, role: str) -> Rule:
        """Per-tensor scale, fp32 or power of two."""
        return Rule(
            self.fp8_format.for_role(role),
            TENSOR,
            "pow2" if self.use_power_2_scales else "fp32",
            margin=self.margin,
            epsilon=self.amax_epsilon,
            stochastic=self._stochastic(role),
        )


@dataclass(frozen=True, repr=False)
class Float8RowwiseScaling(Recipe):
    """One power-of-two scale per row along the contraction, in each direction (torchao's 'rowwise')."""

    fp8_format: Format = Format.E4M3
    amax_epsilon: float = 0.0
    stochastic_rounding: bool = False

    def rule(self, role: str) -> Rule:
        """Per-row power-of-two scale."""
        return Rule(
            self.fp8_format.for_role(role),
            ROW,
            "pow2",
            epsilon=self.amax_epsilon,
            stochastic=self._stochastic(role),
        )


@dataclass(frozen=True, repr=False)
class Float8BlockScaling(Recipe):
    """1x128 blocks for input and grad_output, 128x128 for weight (DeepSeek-V3, arXiv 2412.19437, section 3.3).

    Scales are powers of two; with ``use_f32_scales`` any float32.
    """

    fp8_format: Format = Format.E4M3
    use_f32_scales: bool = False
    amax_epsilon: float = 0.0
    stochastic_rounding: bool = False

    def rule(self, role: str) -> Rule:
        """1x128, or 128x128 for the weight."""
        return Rule(
            self.fp8_format.for_role(role),
            BLOCK_128X128 if role == "weight" else BLOCK_1X128,
            "fp32" if self.use_f32_scales else "pow2",
            epsilon=self.amax_epsilon,
            stochastic=self._stochastic(role),
        )


@dataclass(frozen=True, repr=False)
class MXFP8BlockScaling(Recipe):
    """1x32 blocks with E8M0 scales rounded up (OCP MX 1.0; rounding: arXiv 2506.08027)."""

    fp8_format: Format = Format.E4M3
    stochastic_rounding: bool = False

    def rule(self, role: str) -> Rule:
        """1x32 blocks along the contraction, in each direction."""
        return Rule(self.fp8_format.for_role(role), BLOCK_1X32, "e8m0", stochastic=self._stochastic(role))


@dataclass(frozen=True, repr=False)
class NVFP4BlockScaling(Recipe):
    """Blocks of 16 E2M1 codes with E4M3 scales and one float32 scale a tensor (NVIDIA, arXiv 2509.25149): 1x16 for input
    and grad_output, 16x16 for weight.

    Args:
        disable_rht: without the random Hadamard transform of wgrad's operands.
        disable_stochastic_rounding: grad_output is rounded to nearest even.
        disable_2d_quantization: weights in 1x16 blocks too, with other codes in each direction.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        check_flags(self, "disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
        super().__post_init__()

    def rule(self, role: str) -> Rule:
        """1x16 blocks along the contraction, in each direction; 16x16 for the weight."""
        if role not in ROLES:
            raise ValueError(f"role {role!r} is unknown: choose one of {', '.join(ROLES)}")
        if role == "weight":
            return Rule(E2M1, BLOCK_1X16 if self.disable_2d_quantization else BLOCK_16X16, "e4m3")
        stochastic = role == "grad_output" and not self.disable_stochastic_rounding
        return Rule(E2M1, BLOCK_1X16, "e4m3", stochastic=stochastic, hadamard=not self.disable_rht)


RoleFactory = Callable[[str], Rule | Recipe | None]


def _accepts_one_argument(function: Callable[..., Any]) -> bool:
    """Whether it can be called with one argument; True if Python cannot tell (functions written in C)."""
    try:
        inspect.signature(function).bind("input")
    except TypeError:
        return False
    except ValueError:
        return True
    return True


@dataclass(frozen=True, repr=False, eq=False)
class CustomRecipe(Recipe):
    """A user's recipe: ``qfactory(role)`` returns each role's Rule, or a recipe whose rule for that role applies, or
    None to leave the role in high precision (then the GEMMs that read it run in high precision).

    It is called once for each role, when the recipe is made. Recipes are compared by its answers: a function may answer
    differently later, and an object that is called need not be hashable.

    Raises:
        ValueError: qfactory does not take one role, returns something else, or pairs E5M2 with E5M2 in one GEMM.
    """

    qfactory: RoleFactory

    def __post_init__(self) -> None:
        if not callable(self.qfactory) or not _accepts_one_argument(self.qfactory):
            trouble = "does not take one argument" if callable(self.qfactory) else "is not callable"
            raise ValueError(
                f"CustomRecipe qfactory {self.qfactory!r} {trouble}: give a function of the role ('input', 'weight' or"
                " 'grad_output')"
            )
        object.__setattr__(self, "role_rules", {role: self._ask(role) for role in ROLES})
        refuse_e5m2_twice(products_of(self), "CustomRecipe")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomRecipe) and self.role_rules == other.role_rules

    def __hash__(self) -> int:
        return hash(tuple(self.role_rules.values()))

    def __repr__(self) -> str:
        return f"CustomRecipe({', '.join(f'{role}: {rule!r}' for role, rule in self.role_rules.items())})"

    def rule(self, role: str) -> Rule | None:
        """The rule that qfactory returned for the role."""
        if role not in ROLES:
            raise ValueError(f"role {role!r} is unknown: choose one of {', '.join(ROLES)}")
        return self.role_rules[role]

    def _ask(self, role: str) -> Rule | None:
        answer = self.qfactory(role)
        if isinstance(answer, Recipe):
            answer = answer.rule(role)
        if answer is not None and not isinstance(answer, Rule):
            raise ValueError(
                f"CustomRecipe qfactory({role!r}) returned {type(answer).__name__}: a Rule, a recipe or None is needed"
            )
        if answer is not None and answer.delayed:
            raise ValueError(
                f"CustomRecipe qfactory({role!r}): delayed scaling needs the DelayedScaling recipe's state"
            )
        return answer


RECIPES: dict[str, type] = {
    "delayed": DelayedScaling,
    "tensorwise": Float8CurrentScaling,
    "rowwise": Float8RowwiseScaling,
    "blockwise": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "custom": CustomRecipe,
}
"""Recipe classes by the name used in configs and on the command line."""


def recipe_name(recipe: Recipe) -> str:
    """Returns the config name of a recipe: 'delayed', 'tensorwise', ..."""
    for name, cls in RECIPES.items():
        if type(recipe) is cls:
            return name
    raise ValueError(
        f"{recipe!r} is not a recipe: use one of {', '.join(c.__name__ for c in RECIPES.values())}"
    )


def alignment(recipe: Recipe) -> int:
    """Returns the multiple of tokens that GEMMs need without padding: 16 bytes of codes (32 values in FP4), and a whole
    block for blocks of up to 32 (MX).

    With blocks of 128 the last block may be partial: padding an expert's few tokens to 128 would be mostly zeros.
    Megatron-Core has the same numbers for its recipes (get_fp8_align_size).
    """
    operands = (recipe.role_rules["input"], recipe.role_rules["grad_output"])  # those with tokens
    rules = [rule for rule in operands if rule is not None]
    blocks = {rule.granularity.cols for rule in rules if 0 < rule.granularity.cols <= BLOCK_1X32.cols}
    return math.lcm(16, *blocks, *(16 * rule.fmt.codes_per_byte for rule in rules))


def check_recipe_name(name: str) -> str:
    """Returns the name if it is a recipe's; otherwise raises ValueError with the choices."""
    if not isinstance(name, str) or name not in RECIPES:
        near = difflib.get_close_matches(str(name).lower(), RECIPES, n=1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        if name in [fmt.value for fmt in Format]:
            hint = f". {name!r} names element formats: give it as fp8 (of Fp8Config: backward_format)"
        raise ValueError(f"fp8 recipe {name!r} is unknown: use one of {', '.join(RECIPES)}{hint}")
    return name
