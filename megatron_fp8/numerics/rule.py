"""The rule of one operand: format, granularity, kind of scale. Frozen data.

A recipe gives a Rule for each operand (recipe.py). Casts and scales depend on the rule alone, not on the recipe.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Any, Literal, get_args

from .formats import E2M1, E4M3, E5M2, FloatFormat

ScaleKind = Literal["fp32", "pow2", "e8m0", "e4m3"]
Direction = Literal["rowwise", "columnwise", "both"]
"""The dimension of a matrix along which blocks lie: columns, rows, or both, for one GEMM each."""


@dataclass(frozen=True)
class Granularity:
    """Elements that share a scale: a block of rows x cols; 0 means the whole extent of that dimension.

    Attributes:
        is_tensor: one scale for the whole tensor.
        symmetric: the columnwise side is the rowwise side transposed, without a second quantization.

    Raises:
        ValueError: not whole numbers >= 0.
    """

    rows: int
    cols: int
    is_tensor: bool = field(init=False, repr=False, compare=False)
    symmetric: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not all(type(size) is int and size >= 0 for size in (self.rows, self.cols)):
            raise ValueError(f"Granularity({self.rows!r}, {self.cols!r}): whole numbers >= 0 are needed")
        # Computed once, since every cast and every product reads them.
        object.__setattr__(self, "is_tensor", self.rows == self.cols == 0)
        object.__setattr__(self, "symmetric", self.rows == self.cols)

    def __str__(self) -> str:
        if self.is_tensor:
            return "tensor"
        return "row" if self.cols == 0 else f"{self.rows}x{self.cols}"


TENSOR = Granularity(0, 0)
ROW = Granularity(1, 0)
BLOCK_1X128 = Granularity(1, 128)
BLOCK_128X128 = Granularity(128, 128)
BLOCK_1X32 = Granularity(1, 32)
BLOCK_1X16 = Granularity(1, 16)
BLOCK_16X16 = Granularity(16, 16)


@dataclass(frozen=True)
class Rule:
    """The quantization of one role.

    Args:
        fmt: E4M3, E5M2 or E2M1.
        granularity: elements that share a scale.
        scale: 'fp32', 'pow2' (float32, rounded down to a power of two), 'e8m0' (MX: rounded up, stored in 8 bits) or
            'e4m3' (NVFP4: stored in 8 bits, beside one float32 scale a tensor; for E2M1 alone, in blocks of 16).
        margin, epsilon: as in scaling.compute_scale; only for 'fp32' and 'pow2'.
        delayed: the scale comes from the amax history instead of the tensor itself (granularity TENSOR, 'fp32' only).
        stochastic: stochastic instead of nearest-even rounding.
        hadamard: the columnwise side is quantized after numerics/nvfp4.py's random Hadamard transform ('e4m3' only).
            Both operands of a wgrad have it, or neither.

    Raises:
        ValueError: a value is none of these, or would have no effect.
    """

    fmt: FloatFormat
    granularity: Granularity
    scale: ScaleKind = "fp32"
    margin: int = 0
    epsilon: float = 0.0
    delayed: bool = False
    stochastic: bool = False
    hadamard: bool = False

    def __post_init__(self) -> None:
        if self.fmt not in (E4M3, E5M2, E2M1):
            raise ValueError(f"Rule fmt {self.fmt!r}: use megatron_fp8.numerics.formats.E4M3, E5M2 or E2M1")
        if not isinstance(self.granularity, Granularity):
            raise ValueError(f"Rule granularity {self.granularity!r}: use Granularity(rows, cols)")
        if 0 in (self.granularity.rows, self.granularity.cols) and self.granularity not in (TENSOR, ROW):
            raise ValueError(
                f"Rule granularity {self.granularity!r}: use Granularity(0, 0) for one scale a tensor, (1, 0) for one a"
                " row along the contraction, or a block of rows x cols elements, each 1 or more"
            )
        if self.scale not in get_args(ScaleKind):
            raise ValueError(
                f"Rule scale {self.scale!r} is unknown: use {', '.join(map(repr, get_args(ScaleKind)))}"
            )
        check_flags(self, "delayed", "stochastic", "hadamard")
        _check_nvfp4(self)
        if self.delayed and not (self.granularity.is_tensor and self.scale == "fp32"):
            raise ValueError(
                f"delayed scaling keeps one fp32 scale per tensor, not one {self.scale} scale per {self.granularity}"
            )
        _check_margin(self.margin)
        _check_epsilon(self.epsilon)
        if self.scale in ("e8m0", "e4m3") and (self.margin or self.epsilon):
            raise ValueError(
                f"Rule margin {self.margin} and epsilon {self.epsilon} have no effect on {self.scale!r} scales: leave"
                " them out"
            )

    @cached_property
    def pow2(self) -> bool:
        """Whether every scale is a power of two."""
        return self.scale in ("pow2", "e8m0")

    def __str__(self) -> str:
        return f"{self.fmt.name} {self.granularity} {'delayed ' if self.delayed else ''}{self.scale}"


def _check_nvfp4(rule: Rule) -> None:
    """ValueError unless E2M1, its scales and its blocks come together, and the transform has 1-wide blocks to act on."""
    parts = rule.fmt is E2M1, rule.scale == "e4m3", rule.granularity in (BLOCK_1X16, BLOCK_16X16)
    if any(parts[:2]) and not all(parts):
        raise ValueError(
            f"Rule {rule.fmt.name} with {rule.scale!r} scales per {rule.granularity}: E2M1, 'e4m3' scales and blocks of"
            " 1x16 or 16x16 come together (NVFP4)"
        )
    if rule.hadamard and not (all(parts) and rule.granularity == BLOCK_1X16):
        raise ValueError(
            f"Rule hadamard=True with {rule.fmt.name} per {rule.granularity}: only NVFP4's 1x16 blocks are transformed"
        )


def short_repr(settings: Any) -> str:
    """Formats a dataclass as the call that makes it, without the fields at their defaults."""
    arguments = []
    for each in fields(settings):
        value = getattr(settings, each.name)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if value != default:
            shown = value.value if isinstance(value, Enum) else value
            arguments.append(f"{each.name}={shown!r}")
    return f"{type(settings).__name__}({', '.join(arguments)})"


def check_flags(of: Any, *names: str) -> None:
    """Raises ValueError for a field that is not a bool: the string 'false' would be true."""
    for name in names:
        value = getattr(of, name, False)
        if not isinstance(value, bool):
            raise ValueError(f"{type(of).__name__} {name} {value!r}: True or False is needed")


def _check_margin(margin: int) -> None:
    if not isinstance(margin, int) or isinstance(margin, bool) or not 0 <= margin <= 64:
        raise ValueError(
            f"margin {margin!r}: a whole number from 0 to 64 (powers of two of headroom) is needed"
        )


_LARGEST = (2 - 2.0**-23) * 2.0**127  # of float32


def _check_epsilon(epsilon: float) -> None:
    if not (isinstance(epsilon, (int, float)) and 0 <= epsilon <= _LARGEST):
        raise ValueError(f"amax_epsilon {epsilon!r}: a float32 number >= 0 is needed; 0 turns it off")
