"""Elementwise math of the Triton kernels: the cast, the scales, IEEE division. Same bits as cast.py and scaling.py.

Nothing here may flush subnormals. Two operations need care:

* Division. Triton's `/` is approximate when compiled. Its ``div_rn`` is IEEE in the interpreter and in Triton 3.6 and
  later, but Triton 3.4 compiles it to ``div.rn.ftz``, which makes the inverse of a large scale 0. So the compiled kernels
  name the instruction, ``div.rn.f32``; the interpreter, which runs no PTX, takes ``div_rn``. Square roots and
  reciprocals likewise.
* The cast. The interpreter's own float8 conversions are wrong (2.3 % of bytes; overflow becomes NaN), so the cast there
  is integer arithmetic. Compiled for compute capability 8.9 and later, Triton's conversion is one instruction for two
  elements, ``cvt.rn.satfinite``: to nearest even, saturating, Inf too, NaN to 0x7F. Twenty integer instructions
  would take longer than the memory traffic.

Three more operations are PTX instructions if compiled and integer arithmetic if interpreted: rounding two floats to 16
bits (``narrow``; Triton converts one by one, at an eighth of the rate), the larger of two pairs of 16-bit numbers
(tile_amax.py), and four codes in a word, for sides that are written transposed (``encode_word``).

``COMPILED`` selects between them; nothing else differs. Rejected: integer arithmetic everywhere, which is slower.
Floating-point contraction (a * b + c in one rounding) is off at every launch, because Triton's default for it changes
between versions.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLT_MIN = tl.constexpr(2.0**-126)
FLT_MAX = tl.constexpr(2.0**128 - 2.0**104)
INF = tl.constexpr(0x7F800000)
NAN_CODE = tl.constexpr(0x7F)
HALF_POWER = tl.constexpr(0x00400000)  # 2^-127, a subnormal
ABOVE = tl.constexpr(
    0x001FFFFF
)  # added to a float32's bits, it carries into the exponent if the mantissa is above 1.75


@triton.jit
def _probe():
    pass


COMPILED = tl.constexpr(isinstance(_probe, triton.JITFunction))
"""Whether kernels are compiled; False under TRITON_INTERPRET=1."""


@triton.jit
def as_bits(x):
    """int32 bits of float32 x."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    """float32 of int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def divide(a, b):
    """IEEE float32 a / b; subnormals are kept."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.math.div_rn(a, b)


@triton.jit
def reciprocal(x):
    """IEEE float32 1 / x, in fewer instructions than ``divide``; subnormals are kept."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return divide(1.0, x)


@triton.jit
def square_root(x):
    """IEEE float32 square root; subnormals are kept."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "sqrt.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.sqrt_rn(x)


@triton.jit
def encode(x, E4M3: tl.constexpr):
    """uint8 codes of float32 x, E4M3 or E5M2: saturating, to nearest even; NaN -> 0x7F, +-Inf -> +-max, -0 -> 0x80."""
    if COMPILED:
        if E4M3:
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        return encode_by_integers(x, E4M3)


@triton.jit
def encode_by_integers(x, E4M3: tl.constexpr):
    """``encode`` without conversions.

    Rounds the significand's low bits to nearest even: those that the format lacks, and more of them below its smallest
    normal exponent (LOW). A carry into the exponent gives the right code.
    """
    DROP: tl.constexpr = 20 if E4M3 else 21
    LOW: tl.constexpr = 121 if E4M3 else 113
    TOP: tl.constexpr = 0x43E00000 if E4M3 else 0x47600000  # 448, 57344
    bits = as_bits(x)
    magnitude = bits & 0x7FFFFFFF
    inside = tl.minimum(magnitude, TOP)
    exponent = inside >> 23
    # The hidden bit; float32's subnormals get it too, but become 0 in any case.
    significand = (inside & 0x7FFFFF) | 0x800000
    grid = tl.maximum(exponent, LOW)
    drop = tl.minimum(DROP + grid - exponent, 25)
    steps = (significand + ((1 << (drop - 1)) - 1) + ((significand >> drop) & 1)) >> drop
    code = steps + ((grid - LOW) << (23 - DROP)) + ((bits >> 24) & 0x80)
    return tl.where(magnitude > INF, NAN_CODE, code).to(tl.uint8)


@triton.jit
def encode_word(a, b, c, d, E4M3: tl.constexpr):
    """int32 words of four codes each, in memory order: ``encode`` of float32 a (the lowest byte), b, c and d."""
    if COMPILED:
        if E4M3:
            word = tl.inline_asm_elementwise(
                """{ .reg .b16 low, high;
                cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
                mov.b32 $0, {low, high}; }""",
                "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            word = tl.inline_asm_elementwise(
                """{ .reg .b16 low, high;
                cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
                mov.b32 $0, {low, high}; }""",
                "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        return word
    else:
        low = encode(a, E4M3).to(tl.int32) | (encode(b, E4M3).to(tl.int32) << 8)
        return low | (encode(c, E4M3).to(tl.int32) << 16) | (encode(d, E4M3).to(tl.int32) << 24)


@triton.jit
def decode(codes, E4M3: tl.constexpr):
    """float32 of uint8 codes, by integer arithmetic, for the interpreter's dot."""
    SHIFT: tl.constexpr = 20 if E4M3 else 21
    REBIAS: tl.constexpr = 2.0**120 if E4M3 else 2.0**112
    NAN_FROM: tl.constexpr = 0x7F if E4M3 else 0x7D
    code = codes.to(tl.int32)
    magnitude = code & 0x7F
    bits = as_bits(as_float(magnitude << SHIFT) * REBIAS)
    if not E4M3:
        bits = tl.where(magnitude == 0x7C, INF, bits)
    bits |= (code & 0x80) << 24
    return as_float(tl.where(magnitude >= NAN_FROM, 0x7FC00000, bits))


@triton.jit
def widen(x):
    """float32 of bfloat16, float16 or float32 x. (The interpreter's own conversion loses bfloat16's subnormals.)"""
    if x.dtype == tl.bfloat16 and not COMPILED:
        return as_float(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    elif x.dtype == tl.bfloat16:  # Triton's own conversion extracts the upper one of two values first
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """float32 x as bfloat16, float16 or float32, to nearest even. (The interpreter's own conversion truncates.)"""
    if tl.bfloat16 == DTYPE and not COMPILED:
        bits = as_bits(x)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nan = (bits >> 16) | 0x40
        return tl.where((bits & 0x7FFFFFFF) > INF, nan, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return x.to(DTYPE)


@triton.jit
def zero_outside(x, inside):
    """float32 x where inside, else 0. The compiler keeps the branch and does not make a selection of it."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; selp.f32 $0, $1, 0f00000000, p; }",
            "=f,f,r", [x, inside.to(tl.int32)], dtype=tl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.where(inside, x, 0.0)


@triton.jit
def magnitudes(x):
    """int32 bits of |x|, of float32 x: they sort like the numbers, NaN above INF."""
    return as_bits(x) & 0x7FFFFFFF


@triton.jit
def without_nan(bits):
    """Magnitude bits with 0 in place of NaN."""
    return tl.where(bits > INF, 0, bits)


@triton.jit
def count_nonfinite(bits):
    """int32 number of NaN and Inf among magnitude bits."""
    return tl.sum((bits >= INF).to(tl.int32))


@triton.jit
def record(amax, nonfinite, top, count):
    """Updates amax (int32 view of float32 [], >= 0) by the maximum with ``top``, and adds ``count`` to nonfinite
    (float32 [])."""
    tl.atomic_max(amax, top, sem="relaxed")
    if count > 0:
        tl.atomic_add(nonfinite, count.to(tl.float32), sem="relaxed")


@triton.jit
def scale_of(bits, fp8_max, epsilon, factor):
    """float32 scale of an amax given by its bits: scaling.compute_scale with factor = 2^-margin, not rounded down."""
    amax = tl.maximum(as_float(bits), epsilon)
    ordinary = (amax > 0) & (amax <= FLT_MAX)
    scale = divide(fp8_max * factor, tl.where(ordinary, amax, 1.0))
    return tl.where(ordinary, tl.minimum(tl.maximum(scale, FLT_MIN), FLT_MAX), 1.0)


@triton.jit
def power_scale_of(bits, fp8_max, epsilon, factor):
    """``scale_of`` rounded down to a power of two, as int32 bits, without dividing; factor is 2^-7 or more.

    Both formats' maxima are 1.75 times a power of two. So the quotient's exponent is the difference of the exponents, one
    less where the amax's mantissa is above 1.75 (just above, the quotient is more than half a unit below the power).
    A subnormal amax has an exponent field of 0, and its scale is the largest, 2^127.
    """
    amax = as_bits(tl.maximum(as_float(bits), epsilon))
    top = (as_bits(tl.full((), fp8_max, tl.float32) * factor) >> 23) + 127
    exponent = tl.minimum(tl.maximum(top - ((amax + ABOVE) >> 23), 1), 254)
    return tl.where((amax == 0) | (amax >= INF), 127 << 23, exponent << 23)


@triton.jit
def scales(bits, epsilon, factor, E4M3: tl.constexpr, KIND: tl.constexpr):
    """(float32 scale, stored inverse) of amaxes given by their bits.

    KIND 'fp32', 'pow2' and 'pow2_divided': as scaling.compute_scale with epsilon and factor = 2^-margin; the inverse is
    float32. 'pow2' needs a margin of at most 6 (``kind_for``).
    KIND 'e8m0': as scaling.compute_e8m0; the stored inverse is the uint8 exponent.
    """
    FP8_MAX: tl.constexpr = 448.0 if E4M3 else 57344.0
    if KIND == "e8m0":
        MAX_EXPONENT: tl.constexpr = 8 if E4M3 else 15
        # Mantissas above 1.75, that of both formats' maxima, carry into the exponent: rounded up.
        exponent = tl.maximum(((bits + ABOVE) >> 23) - MAX_EXPONENT, 0)
        exponent = tl.where(bits >= INF, 254, exponent)
        return as_float(tl.maximum((254 - exponent) << 23, HALF_POWER)), exponent.to(tl.uint8)
    elif KIND == "fp32":
        scale = scale_of(bits, FP8_MAX, epsilon, factor)
        return scale, divide(1.0, scale)
    else:
        if KIND == "pow2":
            power = power_scale_of(bits, FP8_MAX, epsilon, factor)
        else:
            power = as_bits(scale_of(bits, FP8_MAX, epsilon, factor)) & INF
        return as_float(power), as_float(tl.maximum((254 << 23) - power, HALF_POWER))


@triton.jit
def cast_scale(bits, epsilon, factor, E4M3: tl.constexpr, KIND: tl.constexpr, FINITE: tl.constexpr):
    """``scales``' float32 scale, for codes alone. For an amax of 0 it may differ; zeros stay zeros.

    FINITE: no amax is Inf. A power of two then takes three instructions, which subtract exponents in place. The minuend
    may overflow 32 bits, the difference does not.
    """
    FP8_MAX: tl.constexpr = 448.0 if E4M3 else 57344.0
    if KIND == "pow2" or KIND == "e8m0":
        if KIND == "pow2":
            top = (as_bits(tl.full((), FP8_MAX, tl.float32) * factor) >> 23) + 127
            least = as_bits(tl.full((), 0.0, tl.float32) + epsilon)
        else:
            top = 262 if E4M3 else 269
            least = 0
        # The scale is that of max(amax, epsilon), and at most 2^127.
        floor = tl.maximum(least + ABOVE, (top - 254) << 23)
        power = (top << 23) - (tl.maximum(bits + ABOVE, floor) & INF)
        if not FINITE:
            power = tl.where(bits >= INF, 127 << 23 if KIND == "pow2" else HALF_POWER, power)
        return as_float(power)
    else:
        scale, _ = scales(bits, epsilon, factor, E4M3, KIND)
        return scale


def kind_for(kind: str, margin: int) -> str:
    """The KIND for scales of this kind with this margin."""
    return "pow2_divided" if kind == "pow2" and margin > 6 else kind
