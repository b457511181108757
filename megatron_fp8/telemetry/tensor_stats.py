"""Statistics of tensors from sums and extremes, which are additive over pieces.

A site's tensor comes in pieces: micro-batches, and shards on ranks. So each piece is reduced to two vectors;
those of the whole are the sum of the first and the maximum of the second: one all-reduce each, for all sites
together. ``finish`` then computes the statistics once.

All sums are float64 power sums about zero: of x, x^2, x^3 and x^4. They give variance and kurtosis. Digits
cancel if the mean is far above the spread: std is accurate to 1e-6 up to a mean of 10,000 standard
deviations, kurtosis up to about 100; beyond that ``finish`` omits kurtosis.
Rejected: moments about each piece's own mean, merged pairwise (Chan, Golub and LeVeque; Pebay). They do not
cancel, but a merge is not a sum, so every rank would gather the values of all ranks. Rejected: a shift shared
by ranks, such as the last mean: values would depend on earlier measurements.

NaN and Inf are counted and excluded from all other statistics. In Transformer Engine they make most
statistics NaN or Inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch

from ..kernels.cast_dispatch import decode, in_memory
from ..kernels.cpu import stats
from ..kernels.cpu.stats import Side
from ..numerics import host_sync, nvfp4
from ..numerics.cast import check_float, chunks
from ..numerics.formats import E4M3
from ..numerics.rule import Direction, Granularity
from ..numerics.scaling import view_blocks
from ..numerics.subnormals import keep_subnormals
from ..tensor import Float8Tensor, QuantizedSide, scale_blocks_
from .stat_registry import Blocks, StatisticName, Variant, parse_all

_ROUNDING = 2.0**-50
"""Error bound of a float64 sum of many numbers, relative to the sum of their magnitudes."""


class Measurement(NamedTuple):
    """Measurement of one piece: sums and extremes, float64 [n] each, on the piece's device. Merged by + and by max."""

    sums: torch.Tensor
    extremes: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """The requested statistics, and the position of each sum and extreme in the two vectors.

    Create with ``Layout.of(names)``, which caches.
    """

    wanted: tuple[StatisticName, ...]

    @staticmethod
    def of(names: Iterable[str]) -> Layout:
        """The layout for these names (any valid spelling). Raises ValueError as ``stat_registry.parse``."""
        return _layout(parse_all(names))

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """The codes needed: the run's own (recipe '') and those of what-ifs, each with its direction."""
        return tuple(dict.fromkeys(w.variant for w in self.wanted if w.statistic.needs == "codes"))

    @cached_property
    def directions(self) -> dict[str, Direction]:
        """Recipe ('': the run's own) -> sides of codes needed."""
        found: dict[str, Direction] = {}
        for recipe, columnwise in ((v.recipe, v.columnwise) for v in self.variants):
            side: Direction = "columnwise" if columnwise else "rowwise"
            found[recipe] = side if found.get(recipe, side) == side else "both"
        return found

    @cached_property
    def blocks(self) -> tuple[Blocks, ...]:
        """The blocks whose largest range is requested."""
        return tuple(w.blocks for w in self.wanted if w.blocks is not None)

    @cached_property
    def sums(self) -> tuple[str, ...]:
        """Names of the sums, by position."""
        return (*VALUE_SUMS, *(v.named(key) for v in self.variants for key in CODE_SUMS))

    @cached_property
    def extremes(self) -> tuple[str, ...]:
        """Names of the extremes, by position."""
        codes = (v.named(key) for v in self.variants for key in CODE_EXTREMES)
        return (*VALUE_EXTREMES, *(blocks.name for blocks in self.blocks), *codes)


@cache
def _layout(wanted: tuple[StatisticName, ...]) -> Layout:
    return Layout(wanted)


VALUE_SUMS = ("numel", "finite", "sum", "magnitudes", "squares", "cubes", "fourths")
VALUE_EXTREMES = ("max", "-min", "-amin")
CODE_SUMS = ("coded", "finite_coded", "signal", "error", "underflows", "overflows")
CODE_EXTREMES = ("scale_inv_max", "-scale_inv_min")


@torch.no_grad()
def measure(x: torch.Tensor, layout: Layout, codes: Mapping[str, Float8Tensor] | None = None) -> Measurement:
    """Sums and extremes of one piece of a tensor.

    Args:
        x: float32, bfloat16 or float16, any shape: a matrix [rows, cols], or flattened to [-1, last
            dimension]. May be empty. Does not synchronise with a GPU.
        layout: what to measure.
        codes: quantized x: under '' the run's own codes, under a what-if prefix those of that recipe. Missing
            codes are not measured. A columnwise statistic needs the columnwise side; others use the rowwise
            side, or the columnwise one if it is the only one.

    Raises:
        ValueError: the dtype cannot be quantized, or codes have another shape than x.
    """
    check_float(x)
    matrix = in_memory(x)
    if x.ndim != 2:
        last = x.shape[-1] if x.ndim else 1
        matrix = matrix.reshape(x.numel() // max(last, 1), last)
    matrix = matrix.contiguous()
    sides = [_side(codes or {}, variant, matrix) for variant in layout.variants]
    present = [side for side in sides if side is not None]
    if stats.usable(matrix) and all(stats.is_plain(side.made) for side in present):
        return _in_c(matrix, layout, sides, present)
    of_values, extremes_of_values = measure_values(matrix, layout.blocks)
    sums, extremes = [of_values], [extremes_of_values]
    # numel, finite and squares are stored per variant, since its codes may be missing in some pieces
    shared = [of_values[:2], of_values[4:5]]
    for side in sides:
        if side is None:
            sums.append(torch.zeros(len(CODE_SUMS), dtype=torch.float64, device=x.device))
            extremes.append(torch.full((2,), -math.inf, dtype=torch.float64, device=x.device))
        else:
            of_codes, scales = measure_codes(matrix, side)
            sums += [*shared, of_codes]
            extremes.append(scales)
    return Measurement(torch.cat(sums), torch.cat(extremes))


def _in_c(x: torch.Tensor, layout: Layout, sides: list[Side | None], present: list[Side]) -> Measurement:
    """``measure`` in C for a matrix [rows, cols], in one pass."""
    values, of_codes = stats.measure(x, present)
    numel, finite, squares = float(x.numel()), values[0], values[3]
    sums, extremes = [numel, *values[:6]], values[6:]
    extremes += [max(stats.largest_ratio(x, tile) for tile in tiles(cut)) for cut in layout.blocks]
    results = iter(of_codes)
    for side in sides:
        result = None if side is None else next(results)
        sums += [0.0] * len(CODE_SUMS) if result is None else [numel, finite, squares, *result[:3]]
        extremes += [-math.inf, -math.inf] if result is None else result[3:]
    return Measurement(
        *(torch.tensor(numbers, dtype=torch.float64, device="cpu") for numbers in (sums, extremes))
    )


def _side(codes: Mapping[str, Float8Tensor], variant: Variant, x: torch.Tensor) -> Side | None:
    """The side for a variant of x [rows, cols]; None if missing, or if its codes are of a transform of x."""
    quantized = codes.get(variant.recipe)
    if quantized is None:
        return None
    columnwise = variant.columnwise or quantized.rowwise is None
    side = quantized.columnwise if columnwise else quantized.rowwise
    return None if side is None or side.hadamard else side_of(side, x.shape, columnwise=columnwise)


def finish(
    layout: Layout, sums: torch.Tensor | Iterable[float], extremes: torch.Tensor | Iterable[float]
) -> dict[str, float]:
    """The statistics by name, in the layout's order. Undefined ones are omitted, so every value is finite.

    Without a finite element only nonfinite and the blockwise range are defined. std needs two finite elements, kurtosis
    a spread that cancellation did not lose, sqnr_db an error and a signal, dynamic_range an element other than 0 (a
    blockwise range of zeros is 0), and statistics of codes need codes.
    """
    as_list = [v.tolist() if isinstance(v, torch.Tensor) else list(v) for v in (sums, extremes)]
    total = dict(zip(layout.sums, as_list[0], strict=True))
    most = dict(zip(layout.extremes, as_list[1], strict=True))
    found: dict[str, float] = {}
    for statistic in layout.wanted:
        value = (
            _VALUE[statistic.name](total, most)
            if statistic.name in _VALUE
            else _of_codes(statistic, total, most)
        )
        if value is not None and math.isfinite(value):
            found[statistic.name] = value
    return found


_Figures = Mapping[str, float]


def _mean(total: _Figures, most: _Figures) -> float | None:
    return total["sum"] / total["finite"] if total["finite"] else None


def _variance(total: _Figures) -> float:
    """The second central moment, divided by n; 0 if it is within rounding error."""
    n = total["finite"]
    mean, square = total["sum"] / n, total["squares"] / n
    variance = square - mean * mean
    return variance if variance > _ROUNDING * square else 0.0


def _std(total: _Figures, most: _Figures) -> float | None:
    n = total["finite"]
    return math.sqrt(_variance(total) * (n / (n - 1))) if n > 1 else None


def _kurtosis(total: _Figures, most: _Figures) -> float | None:
    n = total["finite"]
    if not n or not (variance := _variance(total)):
        return None
    mean, square, cube, fourth = (total[key] / n for key in ("sum", "squares", "cubes", "fourths"))
    moment = fourth - 4 * mean * cube + 6 * mean**2 * square - 3 * mean**4
    lost = _ROUNDING * (fourth + 6 * mean**2 * square)
    return moment / variance**2 if moment > 1e6 * lost else None


def _amax(total: _Figures, most: _Figures) -> float:
    return max(most["max"], most["-min"])


def _dynamic_range(total: _Figures, most: _Figures) -> float | None:
    amax, amin = _amax(total, most), -most["-amin"]
    return math.log2(amax) - math.log2(amin) if 0 < amin < math.inf else None


_VALUE = {
    "min": lambda total, most: -most["-min"],
    "max": lambda total, most: most["max"],
    "mean": _mean,
    "std": _std,
    "l1_norm": lambda total, most: total["magnitudes"] if total["finite"] else None,
    "l2_norm": lambda total, most: math.sqrt(total["squares"]) if total["finite"] else None,
    "cur_amax": _amax,
    "dynamic_range": _dynamic_range,
    "kurtosis": _kurtosis,
    "nonfinite": lambda total, most: total["numel"] - total["finite"],
}


def _of_codes(parsed: StatisticName, total: _Figures, most: _Figures) -> float | None:
    """A blockwise range or a statistic of codes."""
    if parsed.blocks is not None:
        return math.log2(ratio) if (ratio := most[parsed.name]) > 0 else None
    named, base = parsed.variant.named, parsed.statistic.name
    numel, finite = total[named("coded")], total[named("finite_coded")]
    signal, error = total[named("signal")], total[named("error")]
    if base in ("underflows%", "overflows%"):
        return 100 * total[named(base.removesuffix("%"))] / numel if numel else None
    if base == "mse":
        return error / finite if finite else None
    if base == "sqnr_db":
        return 10 * math.log10(signal / error) if signal > 0 and error > 0 else None
    return most[named(base)] if base == "scale_inv_max" else -most[named("-scale_inv_min")]


_BEYOND = 1 + 2.0**-21
"""Scale and inverse are rounded, so the element with the amax may exceed the largest code by this factor."""


@keep_subnormals
def measure_values(x: torch.Tensor, blocks: Sequence[Blocks]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and extremes of the finite elements of a contiguous matrix x [rows, cols].

    Returns:
        float64 [7]: number of elements, number of finite ones, sums of x, |x|, x^2, x^3, x^4. And float64 [3
        + len(blocks)]: the maxima of x, of -x, and of -|x| over x != 0; then for each of blocks the largest
        ratio of a block's largest to its smallest non-zero magnitude (1 for zeros). The maximum of nothing is
        -Inf.
    """
    flat = x.reshape(-1)
    sums = torch.zeros(7, dtype=torch.float64, device=x.device)
    extremes = torch.full((3,), -math.inf, dtype=torch.float64, device=x.device)
    for part in chunks(flat.numel(), flat.numel(), x.device):
        found = _values_of_chunk(flat[part])
        sums += found[0]
        extremes = torch.maximum(extremes, found[1])
    largest = [torch.stack([_ratio(x, tile) for tile in tiles(cut)]).amax(0, keepdim=True) for cut in blocks]
    return sums, torch.cat([extremes, *largest])


def tiles(cut: Blocks) -> list[tuple[int, int]]:
    """The blocks as (rows, columns)."""
    height = cut.size if cut.dims == 2 else 1
    turned = cut.both_orientations and cut.dims == 1
    return [(height, cut.size), (cut.size, height)] if turned else [(height, cut.size)]


def _values_of_chunk(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The seven sums and three extremes of a chunk of elements."""
    x = part.to(torch.float64)
    finite = x.isfinite()
    count = finite.sum(dtype=torch.float64)
    if host_sync.read_waits(x.device) or float(count) != x.numel():
        lowest, highest = (torch.where(finite, x, math.inf).amin(), torch.where(finite, x, -math.inf).amax())
        x = torch.where(finite, x, 0.0)
    else:
        lowest, highest = x.aminmax()
    square, magnitude = x * x, x.abs()
    smallest = torch.where(magnitude == 0, math.inf, magnitude).amin()
    total = torch.full_like(count, part.numel())
    powers = [torch.dot(square, power) for power in (x, square)]
    sums = [total, count, x.sum(), magnitude.sum(), square.sum(), *powers]
    return torch.stack(sums), torch.stack([highest, -lowest, -smallest])


def _ratio(x: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """The largest ratio of magnitudes within a block, float64 []."""
    if x.numel() == 0:
        return torch.full((), -math.inf, dtype=torch.float64, device=x.device)
    magnitude = x.abs().to(torch.float32)
    tiles = view_blocks(torch.where(magnitude.isfinite(), magnitude, 0.0), *tile)
    largest = tiles.amax((1, 3)).to(torch.float64)
    smallest = torch.where(tiles == 0, math.inf, tiles).amin((1, 3)).to(torch.float64)
    return torch.where(largest == 0, 1.0, largest / smallest).amax()


def side_of(quantized: QuantizedSide, shape: torch.Size, *, columnwise: bool) -> Side:
    """One side of a quantized matrix of this shape, in the matrix's own orientation.

    Args:
        columnwise: the side's codes are [cols, rows].

    Raises:
        ValueError: the codes have another shape.
    """
    codes, scale, granularity = quantized.codes, quantized.float_scale_inv(), quantized.granularity
    block = (granularity.rows, granularity.cols)
    if (of_tensor := quantized.tensor_scale_inv) is not None:
        # E4M3 has all of E2M1's numbers.
        numbers = nvfp4.values(codes)[:, : quantized.shape[1]]
        codes, scale = numbers.to(E4M3.dtype), scale * of_tensor
    if columnwise:
        codes, scale, block = codes.t(), scale.t() if scale.ndim == 2 else scale, block[::-1]
    if codes.shape != shape:
        raise ValueError(
            f"codes of shape {tuple(codes.shape)} were not made of values of shape {tuple(shape)}"
        )
    return Side(codes.contiguous(), scale.contiguous(), block, quantized.fmt.max)


@keep_subnormals
def measure_codes(x: torch.Tensor, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantization statistics of x [rows, cols] and one side of its codes. Ignores NaN and Inf in x.

    Returns:
        float64 [3]: sum of squared errors, number of underflows, number of overflows. And float64 [2]: the
        largest scale_inv and the negated smallest (-Inf if there is none).
    """
    sums = torch.zeros(3, dtype=torch.float64, device=x.device)
    if x.numel() == 0:
        return sums, torch.full((2,), -math.inf, dtype=torch.float64, device=x.device)
    codes, scale, granularity = side.made, side.scale, Granularity(*side.block)
    smallest, largest = scale.aminmax()
    unit = granularity.rows or 1  # chunks hold whole blocks
    for part in chunks(-(-x.shape[0] // unit), x.numel(), x.device):
        rows = slice(unit * part.start, unit * part.stop)
        of_part = (scale[part] if granularity.rows else scale).to(torch.float64)
        sums += _quantization_of_chunk(x[rows], codes[rows], of_part, granularity, side.largest)
    return sums, torch.stack([largest, -smallest]).to(torch.float64)


def _quantization_of_chunk(
    x: torch.Tensor, made: torch.Tensor, scale: torch.Tensor, granularity: Granularity, fp8_max: float
) -> torch.Tensor:
    """The three sums over a chunk of rows; scale is float64."""
    values = x.to(torch.float64)
    finite = values.isfinite()
    values = torch.where(finite, values, 0.0)
    meant = decode(made, torch.float32).to(torch.float64)
    vanished = ((meant == 0) & (values != 0)).sum()
    top = _scaled(torch.full_like(values, fp8_max * _BEYOND), scale, granularity)
    lost = torch.where(finite, values - _scaled(meant, scale, granularity), 0.0)
    return torch.stack([lost.square().sum(), vanished, (values.abs() > top).sum()])


def _scaled(values: torch.Tensor, scale: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Multiplies values [rows, cols] in place by the scale of their block."""
    if granularity.rows == 0:  # one scale per column, or one for all
        return values.mul_(scale)
    return scale_blocks_(values, scale, granularity)
