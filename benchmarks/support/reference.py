"""The specification of docs/numerics.md written out slowly, in numpy, with no line shared with the package.

Inputs are float32 arrays (BF16 and FP16 widen to float32 exactly) and results are uint8 codes and float32
scales. Rounding is never computed with bit tricks here: a value is compared with the table of representable
values, and a power of two is found by comparing with the table of powers of two. Both tables and every
comparison are exact in float64.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np

F32_MAX = np.finfo(np.float32).max
POWERS = np.ldexp(np.float64(1), np.arange(-149, 128))  # every power of two that float32 holds


@dataclass(frozen=True)
class Spec:
    """One element format: sign, `exponent_bits`, `mantissa_bits`; `largest` is its largest finite value."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    ieee_specials: bool  # True: the top exponent is Inf and NaN (E5M2); False: only all ones is NaN (E4M3)

    def value(self, code: int) -> float:
        """The exact value of one code."""
        sign = -1.0 if code & 0x80 else 1.0
        magnitude = code & 0x7F
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        if self.ieee_specials and exponent == (1 << self.exponent_bits) - 1:
            return float("nan") if mantissa else sign * float("inf")
        if not self.ieee_specials and magnitude == 0x7F:
            return float("nan")
        fraction = Fraction(mantissa, 1 << self.mantissa_bits)
        if exponent == 0:
            return sign * float(fraction * Fraction(2) ** (1 - self.bias))
        return sign * float((1 + fraction) * Fraction(2) ** (exponent - self.bias))

    @cache  # noqa: B019
    def values(self) -> np.ndarray:
        """float64 [256]: the value of every code. Made once, so nobody may write to it."""
        table = np.array([self.value(code) for code in range(256)])
        table.setflags(write=False)
        return table

    def magnitudes(self) -> np.ndarray:
        """float64: the finite values of codes 0, 1, 2, ... in ascending order; the index is the code."""
        positive = self.values()[:128]
        return positive[np.isfinite(positive)]


E4M3 = Spec("e4m3", 4, 3, 7, 448.0, ieee_specials=False)
E5M2 = Spec("e5m2", 5, 2, 15, 57344.0, ieee_specials=True)


# ---------------------------------------------------------------------------------------------- elements


def encode_one(value: float, spec: Spec) -> int:
    """Code of one finite real number: the nearest representable value, ties to the even code, saturating."""
    sign = 0x80 if np.signbit(value) else 0
    exact = abs(Fraction(value))
    grid = [Fraction(v) for v in spec.magnitudes()]
    return sign | min(range(len(grid)), key=lambda code: (abs(grid[code] - exact), code & 1))


def encode(product: np.ndarray, spec: Spec) -> np.ndarray:
    """Codes (uint8) of float32 products: `encode_one` for whole arrays, plus Inf -> +-max and NaN -> 0x7F."""
    grid = spec.magnitudes()
    size = np.abs(product.astype(np.float64))
    size = np.where(np.isnan(size), 0.0, np.minimum(size, grid[-1]))
    above = np.searchsorted(grid, size, side="left")  # first grid point >= size
    below = np.maximum(above - 1, 0)
    to_below, to_above = size - grid[below], grid[above] - size
    tie_goes_below = (to_below == to_above) & (below % 2 == 0)
    code = np.where((to_below < to_above) | tie_goes_below, below, above).astype(np.uint8)
    code |= np.where(np.signbit(product), 0x80, 0).astype(np.uint8)
    return np.where(np.isnan(product), np.uint8(0x7F), code)


def cast(x: np.ndarray, scale: np.ndarray | float, spec: Spec) -> np.ndarray:
    """code = RNE(float32(x) * float32(scale)), the product itself rounded to float32."""
    with np.errstate(all="ignore"):
        return encode(x.astype(np.float32) * np.asarray(scale, dtype=np.float32), spec)


def decode(codes: np.ndarray, spec: Spec) -> np.ndarray:
    """float64 values of uint8 codes."""
    return spec.values()[codes]


# ------------------------------------------------------------------------------------------------ scales


def amax(x: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """Largest |x| that is not NaN, float32; 0 where there is none."""
    size = np.where(np.isnan(x), np.float32(0), np.abs(x.astype(np.float32)))
    return np.max(size, axis=axis, initial=np.float32(0)).astype(np.float32)


def power_of_two_below(x: np.ndarray) -> np.ndarray:
    """The largest power of two that is not above x (x > 0, finite), float32."""
    index = np.searchsorted(POWERS, x.astype(np.float64), side="right") - 1
    return POWERS[index].astype(np.float32)


def scale(
    amax: np.ndarray | float, largest: float, *, margin: int = 0, epsilon: float = 0.0, pow2: bool = False
) -> np.ndarray:
    """float32 scale of an amax, rules 1 to 4 of the amax section."""
    floor = np.maximum(np.asarray(amax, dtype=np.float32), np.float32(epsilon))
    with np.errstate(all="ignore"):
        result = np.float32(largest * 2.0**-margin) / floor
    result = np.where(np.isinf(result), np.float32(2.0**127) if pow2 else F32_MAX, result)
    result = np.maximum(result, np.float32(2.0**-126))  # a subnormal scale would have an infinite inverse
    useless = (floor == 0) | np.isinf(floor)
    result = np.where(useless, np.float32(1), result).astype(np.float32)
    return power_of_two_below(result) if pow2 else result


def scale_inv(scale: np.ndarray) -> np.ndarray:
    """IEEE float32 1 / scale (subnormal where it must be)."""
    with np.errstate(all="ignore"):
        return (np.float32(1) / scale).astype(np.float32)


def e8m0_one(amax: float, largest: float) -> int:
    """ceil(log2(amax / largest)) + 127 in rational arithmetic, clamped to [0, 254]."""
    if amax == float("inf"):
        return 254
    return min(bisect_left(_reach(largest), Fraction(amax)), 254)


@cache
def _reach(largest: float) -> list[Fraction]:
    """The largest amax that each E8M0 code serves, exactly."""
    return [Fraction(largest) * Fraction(2) ** (code - 127) for code in range(255)]


def e8m0(amax: np.ndarray, largest: float) -> np.ndarray:
    """`e8m0_one` for arrays: the first code k with amax <= largest * 2^(k - 127); uint8."""
    reach = largest * np.ldexp(np.float64(1), np.arange(255) - 127)
    return np.minimum(np.searchsorted(reach, amax.astype(np.float64), side="left"), 254).astype(np.uint8)


def e8m0_value(code: np.ndarray) -> np.ndarray:
    """2^(code - 127), float64."""
    return np.ldexp(np.float64(1), code.astype(np.int64) - 127)


# --------------------------------------------------------------------------------------------- quantize


@dataclass(frozen=True)
class Rule:
    """How one operand of one recipe is quantized; `block` is rows x columns, None meaning 'all of them'."""

    spec: Spec
    block: tuple[int | None, int | None]
    pow2: bool = False
    mx: bool = False
    margin: int = 0
    epsilon: float = 0.0


def quantize(x: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """One direction: float32 [rows, cols] -> codes uint8 [rows, cols], and one scale_inv for each block.

    scale_inv is float32 [row blocks, col blocks], or E8M0 codes (uint8) for MX. Partial blocks simply have
    fewer elements, which is what zero padding amounts to.
    """
    rows, cols = x.shape
    height = rule.block[0] or max(rows, 1)
    width = rule.block[1] or max(cols, 1)
    n_down = 1 if rule.block[0] is None else -(-rows // height)
    n_across = 1 if rule.block[1] is None else -(-cols // width)
    padded = np.zeros((n_down * height, n_across * width), dtype=np.float32)
    padded[:rows, :cols] = x
    tiles = padded.reshape(n_down, height, n_across, width)
    block_amax = amax(tiles, axis=(1, 3))
    if rule.mx:
        inverse = e8m0(block_amax, rule.spec.largest)
        factor = np.ldexp(np.float64(1), 127 - inverse.astype(np.int64)).astype(np.float32)
    else:
        factor = scale(
            block_amax, rule.spec.largest, margin=rule.margin, epsilon=rule.epsilon, pow2=rule.pow2
        )
        inverse = scale_inv(factor)
    codes = cast(tiles, factor[:, None, :, None], rule.spec).reshape(padded.shape)
    return codes[:rows, :cols], inverse


def columnwise(x: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """The other direction: the operand whose contraction runs along x's rows, quantized from x again."""
    height, width = rule.block
    if height == width:  # a tensor or a square block keeps its codes and only turns
        codes, inverse = quantize(x, rule)
        return codes.T, inverse.T
    return quantize(np.ascontiguousarray(x.T), rule)


def dequantize(codes: np.ndarray, inverse: np.ndarray, rule: Rule) -> np.ndarray:
    """float64 [rows, cols]: value of every code times its block's scale_inv, exactly."""
    rows, cols = codes.shape
    factor = e8m0_value(inverse) if rule.mx else inverse.astype(np.float64)
    factor = np.repeat(factor, rule.block[0] or max(rows, 1), axis=0)[:rows]
    factor = np.repeat(factor, rule.block[1] or max(cols, 1), axis=1)[:, :cols]
    return decode(codes, rule.spec) * factor


# ------------------------------------------------------------------------------------ counter-based bits


def philox4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32 with ten rounds (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011)."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & mask, (left >> 32) ^ c3 ^ k1, left & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def encode_stochastic_one(product: float, word: int, spec: Spec) -> int:
    """Code of one finite float32 product, rounded with the 32 random bits `word`.

    The bits that do not fit the format are a fraction of its grid step; as many low bits of `word` are added
    to them, and a carry rounds up. Of more than 32 bits the first 32 count.
    """
    sign = 0x80 if np.signbit(product) else 0
    size = min(abs(Fraction(float(product))), Fraction(spec.largest))
    grid = [Fraction(v) for v in spec.magnitudes()]
    below = max(code for code, value in enumerate(grid) if value <= size)
    if grid[below] == size:
        return sign | below
    step = grid[below + 1] - grid[below]
    fraction = (size - grid[below]) / step
    exponent = int(np.frexp(float(size))[1]) - 1
    dropped = min(int(np.log2(float(step))) - (exponent - 23), 32)
    carry = int(fraction * 2**dropped) + word % 2**dropped >= 2**dropped
    return sign | (below + carry)
