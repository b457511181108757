"""Registry of statistics by name: definition, source, inputs.

Names follow Transformer Engine's debug features, so that dashboards carry over::

    [RECIPE_] STATISTIC [_columnwise]        mxfp8_underflows%    scale_inv_min_columnwise

The prefix RECIPE_ selects the codes of another recipe (WHAT_IF); without it they are the run's own.
``_columnwise`` selects the codes of the transposed matrix, which differ if a scale belongs to a row or to a
1-wide block.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

TENSORS = ("input", "weight", "grad_output", "output", "dgrad", "wgrad")
"""The tensors of a site. The first three are quantized; the others are the products of its GEMMs."""

QUANTIZED = ("input", "weight", "grad_output")

TE_TENSORS = {
    "activation": "input",
    "weight": "weight",
    "gradient": "grad_output",
    "output": "output",
    "dgrad": "dgrad",
    "wgrad": "wgrad",
}
"""Transformer Engine's tensor names -> ours."""

WHAT_IF = {
    "fp8_current_scaling": "tensorwise",
    "fp8_delayed_scaling": "delayed",
    "fp8_block_scaling": "blockwise",
    "mxfp8": "mxfp8",
    "fp8_rowwise_scaling": "rowwise",
    "nvfp4": "nvfp4",
}
"""Prefix of a name -> recipe. The last two are ours, the others are Transformer Engine's."""


@dataclass(frozen=True)
class Statistic:
    """One statistic. docs/telemetry.md has where Transformer Engine's differs.

    Attributes:
        name: its name in settings and records, without prefix and suffix.
        needs: 'values', or 'codes' (values and their codes).
        meaning: its definition, in one sentence.
    """

    name: str
    needs: Literal["values", "codes"]
    meaning: str

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors for which it is defined."""
        return TENSORS if self.needs == "values" else QUANTIZED


STATISTICS = (
    Statistic("min", "values", "The smallest value."),
    Statistic("max", "values", "The largest value."),
    Statistic("mean", "values", "The sum of the values over their number."),
    Statistic("std", "values", "The standard deviation of all values, with n - 1."),
    Statistic("l1_norm", "values", "The sum of the magnitudes."),
    Statistic("l2_norm", "values", "The square root of the sum of the squares."),
    Statistic("cur_amax", "values", "The largest magnitude."),
    Statistic("dynamic_range", "values", "log2 of the largest magnitude over the smallest that is not zero."),
    Statistic(
        "max_blockwise_dynamic_range",
        "values",
        "The largest dynamic range of a block; 0 where all are zeros.",
    ),
    Statistic(
        "kurtosis",
        "values",
        "The fourth central moment over the square of the second (both with n); 3 for a normal distribution.",
    ),
    Statistic("underflows%", "codes", "Values that were not zero and whose code is zero, in percent of all."),
    Statistic(
        "overflows%",
        "codes",
        "Values strictly beyond the largest that their scale can hold, in percent of all.",
    ),
    Statistic("scale_inv_min", "codes", "The smallest scale that codes are multiplied by."),
    Statistic("scale_inv_max", "codes", "The largest scale that codes are multiplied by."),
    Statistic("mse", "codes", "The mean squared error of the values that the codes stand for."),
    Statistic("sqnr_db", "codes", "10 log10 of the squared values' sum over the squared errors' sum."),
    Statistic("nonfinite", "values", "How many values are NaN or Inf."),
)
"""All statistics."""

BY_NAME = {statistic.name: statistic for statistic in STATISTICS}

BLOCKWISE = "max_blockwise_dynamic_range"
_BLOCKS = re.compile(rf"{BLOCKWISE}_block_size_([1-9][0-9]*)_dims_([12])(_max_over_orientations)?")
_COLUMNWISE = "_columnwise"
_ONE_DIRECTION = ("fp8_current_scaling", "fp8_delayed_scaling")

DEFAULT = tuple(name for name in BY_NAME if name != BLOCKWISE)
"""Default statistics: all but the blockwise range, which costs more than the others together."""


@dataclass(frozen=True, order=True)
class Variant:
    """Which codes to use: the run's own (recipe '') or those of a what-if prefix, and the direction."""

    recipe: str = ""
    columnwise: bool = False

    def named(self, statistic: str) -> str:
        """The full name of a statistic of this variant."""
        prefix = f"{self.recipe}_" if self.recipe else ""
        return f"{prefix}{statistic}{_COLUMNWISE if self.columnwise else ''}"


@dataclass(frozen=True, order=True)
class Blocks:
    """Blocks of a blockwise range: ``size`` elements along a row, or size x size; of rows, or of rows and columns."""

    size: int = 32
    dims: int = 1
    both_orientations: bool = False

    @property
    def name(self) -> str:
        """The statistic's full name, in Transformer Engine's spelling."""
        suffix = "_max_over_orientations" if self.both_orientations else ""
        return f"{BLOCKWISE}_block_size_{self.size}_dims_{self.dims}{suffix}"


@dataclass(frozen=True)
class StatisticName:
    """A parsed name. ``name``: canonical spelling. ``variant``: for statistics of codes. ``blocks``: for blockwise
    ranges."""

    name: str
    statistic: Statistic
    variant: Variant = Variant()
    blocks: Blocks | None = None


@cache
def parse(name: str) -> StatisticName:
    """Parses a name.

    ``max_blockwise_dynamic_range`` alone means blocks of 32 elements along a row.

    Raises:
        ValueError: unknown statistic, or a prefix or suffix that it does not have; the message names the
            closest match.
    """
    if not isinstance(name, str):
        raise ValueError(f"statistic {name!r}: a name is needed, such as 'underflows%'")
    if name in BY_NAME and name != BLOCKWISE:
        return StatisticName(name, BY_NAME[name])
    if name == BLOCKWISE:
        return StatisticName(Blocks().name, BY_NAME[BLOCKWISE], blocks=Blocks())
    if found := _BLOCKS.fullmatch(name):
        blocks = Blocks(int(found[1]), int(found[2]), found[3] is not None)
        return StatisticName(blocks.name, BY_NAME[BLOCKWISE], blocks=blocks)
    recipe = next((prefix for prefix in WHAT_IF if name.startswith(f"{prefix}_")), "")
    base = name.removeprefix(f"{recipe}_") if recipe else name
    variant = Variant(recipe, base.endswith(_COLUMNWISE))
    base = base.removesuffix(_COLUMNWISE)
    statistic = BY_NAME.get(base)
    if statistic is None:
        raise ValueError(f"statistic {name!r} is unknown.{_closest(name)}")
    if statistic.needs != "codes":
        raise ValueError(
            f"statistic {name!r}: {base} is a figure of the values, the same whatever their codes: ask for {base!r}"
        )
    if variant.columnwise and recipe in _ONE_DIRECTION:
        raise ValueError(
            f"statistic {name!r}: {recipe} has the same codes in both directions: ask for"
            f" {Variant(recipe).named(base)!r}"
        )
    return StatisticName(name, statistic, variant)


def parse_all(names: Iterable[str]) -> tuple[StatisticName, ...]:
    """Parses names; removes duplicates and keeps the order. Errors as for ``parse``."""
    return tuple({parsed.name: parsed for parsed in map(parse, names)}.values())


def names_of_tensor(names: Iterable[str], tensor: str) -> tuple[str, ...]:
    """The names, in canonical spelling, that are defined for the tensor (one of TENSORS)."""
    return tuple(parsed.name for parsed in parse_all(names) if tensor in parsed.statistic.tensors)


def _closest(name: str) -> str:
    names = [*BY_NAME, Blocks().name]
    names += [Variant(recipe).named(s.name) for recipe in WHAT_IF for s in STATISTICS if s.needs == "codes"]
    match = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {match[0]!r}?" if match else f" There are {', '.join(BY_NAME)}."
