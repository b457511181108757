"""Statistic maps from telemetry.jsonl: sites x measured iterations, by tensor and statistic.

A line contains all statistics of one tensor of one site in one iteration. Maps are stored as
codes, since the file of a long training of a large model has tens of millions of numbers: the upper 24 bits of a
float32, deflated, in base64. Special values have codes among the NaNs. If the data exceed the size limit,
mantissas are shortened first (deflate then compresses better), and after that neighbouring iterations share a
column.

Rejected: 8 bits between a map's smallest and largest value; one spike would take the precision of all other
values.
"""

from __future__ import annotations

import base64
import re
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..files.records import Line
from ..telemetry.stat_registry import BY_NAME, TENSORS, WHAT_IF, parse
from .curves import Event

_NAMES = ("iteration", "site", "tensor", "partial", "went_bad")
"""Fields of a line other than statistics."""


@dataclass(frozen=True)
class Statistics:
    """All statistics of one run.

    Attributes:
        sites: names; the first dimension of a map.
        iterations: int64 [measured], increasing; the second dimension.
        maps: (tensor, statistic) -> codes, uint32 [sites, measured].
        went_bad: for each tensor beyond a limit, the first such iteration with the reason.
        merged: number of measured iterations per column; the column shows the value furthest from the site's
            median. 1 unless ``coarser`` was called.
    """

    sites: tuple[str, ...]
    iterations: NDArray[np.int64]
    maps: dict[tuple[str, str], NDArray[np.uint32]] = field(repr=False)
    went_bad: tuple[Event, ...] = ()
    merged: int = 1

    def coarser(self) -> Statistics:
        """Merges pairs of neighbouring columns; NaN, Infinity and null take precedence over numbers."""
        columns = len(self.iterations)
        ends = self.iterations[0::2]
        maps = {key: _merge_pairs(codes, columns) for key, codes in self.maps.items()}
        return Statistics(self.sites, ends, maps, self.went_bad, 2 * self.merged)


def _merge_pairs(codes: NDArray[np.uint32], columns: int) -> NDArray[np.uint32]:
    if columns % 2:
        codes = np.concatenate([codes, codes[:, -1:]], axis=1)
    left, right = codes[:, 0::2], codes[:, 1::2]
    values = values_of(codes)
    measured = codes != ABSENT
    has_data = measured.any(axis=1)
    middle = np.zeros(len(codes))
    finite = np.where(np.isfinite(values), values, np.nan)
    rows = has_data & np.isfinite(finite).any(axis=1)
    middle[rows] = np.nanmedian(finite[rows], axis=1)
    deviation = np.where(np.isfinite(values), np.abs(values - middle[:, None]), np.inf)
    deviation = np.where(measured, deviation, -1.0)
    return np.where(deviation[:, 0::2] >= deviation[:, 1::2], left, right)


def read_statistics(lines: Iterable[Line], order: Sequence[str] = ()) -> Statistics | None:
    """The statistics in telemetry.jsonl's lines; None if there are none. Of duplicates the last counts.

    Args:
        order: sites in model order, listed first; others follow by name, with numbers ordered by value.

    Raises ValueError with the line: a field is missing or has a wrong type.
    """
    sites: dict[str, int] = {}
    iterations: dict[int, int] = {}
    columns: dict[tuple[str, str], tuple[array, array, array]] = {}
    nulls: dict[tuple[str, str], list[int]] = {}
    bad: list[Event] = []
    for line in lines:
        column_number = iterations.setdefault(line.iteration(), len(iterations))
        row_number = sites.setdefault(line.text("site"), len(sites))
        tensor = line.text("tensor")
        if line.content.get("partial") is True:  # terms of a sum over ranks, not comparable with the sum
            tensor += " (partial sums)"
        for reason in line.texts("went_bad"):
            text = f"{line.text('site')} {tensor}: {reason}"
            bad.append(Event(line.iteration(), line.iteration(), "went bad", text))
        for name in line.content:
            if name in _NAMES:
                continue
            value = line.number_of(name)
            key = (tensor, name)
            if key not in columns:
                columns[key] = (array("l"), array("l"), array("d"))
            rows, times, values = columns[key]
            rows.append(row_number)
            times.append(column_number)
            if value is None:
                nulls.setdefault(key, []).append(len(values))
            values.append(0.0 if value is None else value)
    if not columns:
        return None
    names = _ordered(sites, order)
    row = np.empty(len(sites), dtype=np.int64)
    row[[sites[name] for name in names]] = np.arange(len(sites))
    times_sorted = sorted(iterations)
    column = np.empty(len(iterations), dtype=np.int64)
    column[[iterations[i] for i in times_sorted]] = np.arange(len(iterations))
    maps = {}
    for key in sorted(columns, key=_sort_key):
        rows, times, values = columns.pop(key)
        codes = codes_of(np.frombuffer(values, dtype=np.float64))
        codes[nulls.get(key, [])] = NULL
        shown = np.full((len(sites), len(iterations)), ABSENT, dtype=np.uint32)
        shown[row[np.frombuffer(rows, dtype="l")], column[np.frombuffer(times, dtype="l")]] = codes
        maps[key] = shown
    return Statistics(tuple(names), np.array(times_sorted, dtype=np.int64), maps, tuple(bad))


_KNOWN = list(BY_NAME)


def _sort_key(key: tuple[str, str]) -> tuple:
    """Order of the choices: tensors in GEMM order, statistics in telemetry's order, then by name."""
    tensor, statistic = key
    return (
        TENSORS.index(tensor) if tensor in TENSORS else len(TENSORS), tensor,
        _KNOWN.index(statistic) if statistic in _KNOWN else len(_KNOWN), statistic,
    )  # fmt: skip


def _ordered(sites: Iterable[str], order: Sequence[str]) -> list[str]:
    place = {name: i for i, name in enumerate(order)}

    def key(name: str) -> tuple:
        parts = re.split(r"(\d+)", name)
        return place.get(name, len(place)), [int(p) if p.isdecimal() else p for p in parts[1::2]], parts[0::2]

    return sorted(sites, key=key)


def definition(statistic: str) -> str:
    """A statistic's definition in one sentence; '' if unknown."""
    try:
        known = parse(statistic)
    except ValueError:
        return ""
    words = known.statistic.meaning
    if known.variant.recipe:
        words += f" What it would be with {WHAT_IF[known.variant.recipe]}."
    return f"{words} Of the codes of the transposed matrix." if known.variant.columnwise else words


NAN, NULL, ABSENT = 0x7FC000, 0x7FC001, 0x7FC002
"""Codes of NaN, null, and missing values. Infinities have float32's codes."""
BITS = (15, 11, 9, 7, 5, 4, 3)
"""Mantissa bits to try, most first; the relative error is at most about 2**-(bits + 1)."""
_LARGEST = np.float32(1.875 * 2.0**127)
"""The largest number with three mantissa bits; larger finite numbers are shown as this, not as Infinity."""


def encode_array(values: NDArray) -> str:
    """The array's bytes, little-endian, deflated (zlib format), in base64."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(zlib.compress(little.tobytes(), 6)).decode("ascii")


def codes_of(values: NDArray[np.float64]) -> NDArray[np.uint32]:
    """Codes of numbers, rounded to nearest even. NaN becomes NAN; infinities stay; finite numbers stay finite."""
    finite = np.clip(values, -_LARGEST, _LARGEST)
    rounded = np.where(np.isinf(values), values, finite).astype(np.float32)
    return np.where(np.isnan(values), np.uint32(NAN), round_mantissas(rounded.view(np.uint32), BITS[0]))


def values_of(codes: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Numbers from codes; NaN for NAN, NULL and ABSENT."""
    return (codes << np.uint32(8)).view(np.float32).astype(np.float64)


def round_mantissas(bits: NDArray[np.uint32], mantissa: int) -> NDArray[np.uint32]:
    """Codes from float32 bits, rounded to ``mantissa`` bits; infinities and NaN keep their upper bits."""
    drop = np.uint32(23 - mantissa)
    half = (np.uint32(1) << (drop - np.uint32(1))) - np.uint32(1)
    even = (bits >> drop) & np.uint32(1)
    rounded = ((bits + half + even) >> drop) << drop
    special = (bits & np.uint32(0x7F800000)) == 0x7F800000
    return np.where(special, bits, rounded) >> np.uint32(8)


def encode_map(codes: NDArray[np.uint32], mantissa: int) -> str:
    """Codes [sites, iterations] for the page, with mantissas rounded to ``mantissa`` bits; special codes are
    unchanged.

    Each code is stored as the difference to the previous one, modulo 2**24, since a site changes slowly. All
    high bytes come first, then the middle ones, then the low ones: deflate compresses similar bytes well.
    """
    cut = round_mantissas(codes << np.uint32(8), mantissa)
    steps = np.diff(cut, axis=1, prepend=np.uint32(0))
    planes = np.stack([steps >> np.uint32(16), steps >> np.uint32(8), steps]) & np.uint32(0xFF)
    return encode_array(planes.astype(np.uint8))
