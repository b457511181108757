"""Operand requirements of torch's scaled product: shapes, strides, scale layouts, padding.

``torch._scaled_mm`` and its successor ``_scaled_mm_v2``, which names recipes explicitly, multiply codes on tensor cores.
They require:

    operands   a [M, K] row-major, b [K, N] column-major: the contraction is contiguous in both (Blackwell alone has
               other kernels, for one scale each); K and N multiples of 16
    tensor     one float32 each
    row        a [M, 1], b [1, N], float32, contiguous
    block      a [M, K/128], strides [1, M]; b of 1x128 blocks [N, K/128], strides [1, N]; b of 128x128 blocks
               [ceil4(K/128), N/128], strides [1, ceil4(K/128)]: without that padding results were silently wrong
               (pytorch#166752); M a multiple of 4; one operand at most has 128x128 blocks. This is _scaled_mm_v2,
               which takes E4M3 by E4M3 only. ``_scaled_mm``, asked where the newer product refuses, passes E5M2 on to
               cuBLASLt, which multiplies it, and infers the mode from shapes: b of 1x128 blocks [K/128, N],
               contiguous, with two blocks of K or more (one would look like scales per row), b of 128x128 blocks
               without padding, so K a multiple of 512
    mx         E8M0 in tiles of 128 x 4, each tile 512 bytes, swizzled (placement.py). Blocks of 128 with power-of-two
               scales use this mode where torch has no product for them (Blackwell): each scale serves four blocks
    nvfp4      E4M3 in such tiles, one for 1x16 codes of four bits (a 16x16 block's for 16 rows), and a float32 factor;
               K a multiple of 32, so that a row is whole 16 bytes

Any layout is made to fit. Codes are padded with zeros, scales with ones, and the result is cut. Scales coarser than a
mode's are repeated (a tensor's for every row, a row's for each of its blocks), which changes no number. So mixed recipes
run, and so do 128x128 blocks on both sides.

Two layers make every rule testable without a GPU: ``plan`` computes the exact arguments from shapes and dtypes,
``arguments`` (placement.py) builds such tensors. Rejected: taking the padding from the operator's error message.

Sources: NVIDIA cuBLAS documentation, "Scaling factors layouts"; PyTorch's ScaledBlas.cpp; numerics.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from ...numerics.formats import E2M1
from ...numerics.rule import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Granularity
from ...tensor import QuantizedSide

BLOCK, MX_BLOCK, FP4_BLOCK = 128, 32, 16
FP4_K = 32
"""K must be a multiple of this in NVFP4's product."""
BLOCK_ROWS = 4
"""M must be a multiple of this in torch's products with blocks of 128."""


class Mode(Enum):
    """Granularity of the product's scales."""

    TENSOR = "per tensor"
    ROW = "per row"
    BLOCK = "1x128 by 128x128"
    BLOCK_1D = "1x128 by 1x128"
    MX = "1x32"
    FP4 = "1x16"

    @property
    def recipes(self) -> tuple[list[int], list[int]]:
        """The values of torch.nn.functional.ScalingType of each scale of a and of b."""
        tensor, row, vector_16, vector_32, vector_128, square_128 = 0, 1, 2, 3, 4, 5
        if self is Mode.FP4:
            return [vector_16, tensor], [vector_16, tensor]
        first = {Mode.TENSOR: tensor, Mode.ROW: row, Mode.MX: vector_32}.get(self, vector_128)
        return [first], [square_128 if self is Mode.BLOCK else first]

    @property
    def swizzles(self) -> list[int]:
        """The values of torch.nn.functional.SwizzleType of each operand's scales; torch's default is none."""
        return {Mode.MX: [1], Mode.FP4: [1, 0]}.get(self, [])  # SWIZZLE_32_4_4, NO_SWIZZLE


class Operand(NamedTuple):  # a key of the plan cache in each product: a tuple is hashed fastest
    """The facts of one side that a plan needs: [rows, k] codes of a dtype, and their scaling."""

    rows: int
    k: int
    dtype: torch.dtype
    granularity: Granularity
    e8m0: bool
    pow2: bool = False
    turned: bool = False
    """Whether the codes lie as [k, rows], and a product may read them so: one scale, sizes and start multiples of 16."""

    @staticmethod
    def of(side: QuantizedSide) -> Operand:
        """The facts of a quantized side."""
        e8m0 = side.scale_inv.dtype == torch.float8_e8m0fnu
        rows, k = side.codes.shape
        k *= codes_per_byte_of(side.codes.dtype)
        whole = rows % 16 == k % 16 == side.codes.storage_offset() % 16 == 0
        turned = whole and side.granularity.is_tensor and side.codes.stride() == (1, rows)
        return Operand(rows, k, side.codes.dtype, side.granularity, e8m0, side.pow2, turned)

    @property
    def fits_mx(self) -> bool:
        """Whether its scales, repeated, can be those of 1x32 blocks: powers of two of blocks 128 wide. E8M0 can represent
        their scale_inv, 2^-127 to 2^126."""
        return self.pow2 and self.granularity in (BLOCK_1X128, BLOCK_128X128)


def codes_per_byte_of(dtype: torch.dtype) -> int:
    return E2M1.codes_per_byte if dtype == E2M1.dtype else 1


@dataclass(frozen=True)
class Argument:
    """Shape, strides and dtype of one argument of the product."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Request:
    """A kind of product, which a device and a torch version may support."""

    mode: Mode
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    bias: bool = False
    by: Literal["torch", "torch v1", "kernel"] = "torch"
    """What multiplies: _scaled_mm_v2, _scaled_mm, or, blocks of 128 alone, this package's kernel."""
    turned: tuple[bool, bool] = (False, False)
    """Whether the contraction is the outer dimension of a and of b in memory."""

    @property
    def triton(self) -> bool:
        """Whether this package's kernel multiplies, and not torch."""
        return self.by == "kernel"

    def __str__(self) -> str:
        a, b, out = (str(t).removeprefix("torch.") for t in (self.a, self.b, self.out))
        by = {"torch": "", "torch v1": " by _scaled_mm", "kernel": " by kernels/block_matmul.py"}[self.by]
        turned = ", transposed" if any(self.turned) else ""
        return f"{self.mode.value} scales, {a} by {b} -> {out}{' with bias' if self.bias else ''}{turned}{by}"


@dataclass(frozen=True)
class ProductPlan:
    """One product: its kind, its arguments, and the steps after it.

    Attributes:
        m, n, k: the logical sizes; the arguments' may be larger, and hold two codes of four bits a byte.
        request: the kind of product.
        a, b, scale_a, scale_b: the arguments.
        fast: fast accumulation.
        post_scale: the product runs with scales of one, and its float32 result is multiplied by the row scales.
        post_bias: the bias is added to the float32 result.
    """

    m: int
    n: int
    k: int
    request: Request
    a: Argument
    b: Argument
    scale_a: Argument
    scale_b: Argument
    fast: bool
    post_scale: bool = False
    post_bias: bool = False


Refusal = Callable[[Request], str | None]
"""Why a device has no product for a request; None if it has."""


def mode_of(a: Operand, b: Operand) -> Mode:
    """The mode that multiplies a by b. Raises ValueError if there is none."""
    pair = {a.granularity, b.granularity}
    if pair == {BLOCK_1X32} and a.e8m0 and b.e8m0:
        return Mode.MX
    if a.dtype == b.dtype == E2M1.dtype:
        return Mode.FP4
    if pair == {TENSOR}:
        return Mode.TENSOR
    if pair <= {TENSOR, ROW}:
        return Mode.ROW
    if pair <= {TENSOR, ROW, BLOCK_1X128, BLOCK_128X128}:
        return Mode.BLOCK if b.granularity == BLOCK_128X128 else Mode.BLOCK_1D
    kinds = " by ".join(f"{o.granularity} blocks with {_scales_of(o)} scales" for o in (a, b))
    raise ValueError(f"no tensor-core GEMM multiplies {kinds}")


def _scales_of(operand: Operand) -> str:
    if operand.dtype == E2M1.dtype:
        return "E4M3"
    return "E8M0" if operand.e8m0 else "power-of-two" if operand.pow2 else "float32"


def choose_product(
    mode: Mode,
    a: torch.dtype,
    b: torch.dtype,
    out: torch.dtype,
    bias: torch.dtype | None,
    refusal: Refusal,
    *,
    fits_mx: bool = False,
    fast: bool = False,
    turned: tuple[bool, bool] = (False, False),
) -> tuple[Request, bool, bool]:
    """(request, post_scale, post_bias) of the cheapest product that rounds once. Raises ValueError if there is none.

    The product adds a bias only of its own 16-bit dtype; any other is added to the float32 result. A mode without a
    float32 result (per-row scales in older versions, pytorch#156771) runs per tensor with scales of one; the row scales
    multiply that float32 result, acc * (scale_inv_a * scale_inv_b), in one more pass. So do per-row products without
    fast accumulation where CUTLASS multiplies rows (``uses_cutlass``), which is slow at them. Codes that lie transposed
    (``turned``) are multiplied so where a product takes them (Blackwell), else copied. If none of torch's products
    supports block scales, they use the MX product if they fit it (``fits_mx``), as on Blackwell, whose tensor cores have
    no wider blocks; otherwise this package's own kernel.
    """
    inside = bias is not None and bias == out != torch.float32
    blocks = mode in (Mode.BLOCK, Mode.BLOCK_1D)
    products: list[tuple[Mode, Literal["torch", "torch v1"]]] = [(mode, "torch"), (mode, "torch v1")]
    if mode is Mode.FP4:
        products.pop()  # _scaled_mm takes no factor of the tensors
    if blocks and fits_mx:
        products += (Mode.MX, "torch"), (Mode.MX, "torch v1")
    options: list[tuple[Request, bool, bool]] = []
    for kind, by in products:
        if bias is None or inside:
            options.append((Request(kind, a, b, out, inside, by), False, False))
        options.append((Request(kind, a, b, torch.float32, False, by), False, bias is not None))
    if mode is Mode.ROW:
        by_tensor = [
            (Request(Mode.TENSOR, a, b, torch.float32, by=by), True, bias is not None) for _, by in products
        ]
        options = (
            [*by_tensor, *options] if not fast and uses_cutlass(a, b, refusal) else [*options, *by_tensor]
        )
    if blocks:
        options.append((Request(mode, a, b, out, bias is not None, "kernel"), False, False))
    if mode is Mode.TENSOR and any(turned):
        options = [(replace(one, turned=turned), False, later) for one, _, later in options] + options
    reasons = []
    for option in options:
        reason = refusal(option[0])
        if reason is None:
            return option
        reasons.append(f"{option[0]}: {reason}")
    raise ValueError("; ".join(dict.fromkeys(reasons)))


def uses_cutlass(a: torch.dtype, b: torch.dtype, refusal: Refusal) -> bool:
    """Whether torch multiplies codes with scales per row by CUTLASS, which has no float32 result; cuBLAS has one."""
    row = Request(Mode.ROW, a, b, torch.float32)
    return refusal(row) is not None and refusal(replace(row, by="torch v1")) is not None


@lru_cache(maxsize=4096)
def plan(
    a: Operand,
    b: Operand,
    out: torch.dtype,
    bias: torch.dtype | None,
    fast: bool,
    refusal: Refusal,
) -> ProductPlan:
    """Plans the product a [M, K] @ b [N, K]^T, with all shapes and strides.

    Args:
        out: bfloat16, float16 or float32; bias: dtype of a bias [N], or None.
        fast: fast accumulation, if the mode has it (never with blocks).
        refusal: why the device does not support a request.

    Raises:
        ValueError: nothing multiplies such operands; the message says why.
    """
    mode, fits_mx = mode_of(a, b), a.fits_mx and b.fits_mx
    request, post_scale, post_bias = choose_product(
        mode, a.dtype, b.dtype, out, bias, refusal, fits_mx=fits_mx, fast=fast, turned=(a.turned, b.turned)
    )
    m, n, k = padded_sizes(request, a.rows, b.rows, a.k)
    scale_a, scale_b = scale_arguments(request, m, n, k)
    k //= codes_per_byte_of(a.dtype)
    turned = request.turned
    return ProductPlan(
        a.rows,
        b.rows,
        a.k,
        request,
        Argument((m, k), (1, m) if turned[0] else (k, 1), a.dtype),
        Argument((k, n), (n, 1) if turned[1] else (1, k), b.dtype),
        scale_a,
        scale_b,
        fast and request.mode in (Mode.TENSOR, Mode.ROW),
        post_scale,
        post_bias,
    )


def padded_sizes(request: Request, m: int, n: int, k: int) -> tuple[int, int, int]:
    """(M, N, K) padded: N to 16, K to 16 or whole blocks, M to 4 if block scales need it. This package's own kernel takes
    any M and N."""
    if request.triton:
        return m, n, round_up(k, 16)
    if request.mode not in (Mode.BLOCK, Mode.BLOCK_1D):
        return m, round_up(n, 16), round_up(k, {Mode.MX: MX_BLOCK, Mode.FP4: FP4_K}.get(request.mode, 16))
    contraction = BLOCK
    if request.by == "torch v1":
        contraction, k = (4 * BLOCK, k) if request.mode is Mode.BLOCK else (BLOCK, max(k, 2 * BLOCK))
    return round_up(m, BLOCK_ROWS), round_up(n, 16), round_up(k, contraction)


def scale_arguments(request: Request, m: int, n: int, k: int) -> tuple[Argument, Argument]:
    """Shape and strides of both scales, for padded sizes."""
    mode, f32 = request.mode, torch.float32
    if mode is Mode.TENSOR:
        return Argument((1,), (1,), f32), Argument((1,), (1,), f32)
    if mode is Mode.ROW:
        return Argument((m, 1), (1, 1), f32), Argument((1, n), (n, 1), f32)
    if mode in (Mode.MX, Mode.FP4):
        width, dtype = (
            (MX_BLOCK, torch.float8_e8m0fnu) if mode is Mode.MX else (FP4_BLOCK, torch.float8_e4m3fn)
        )
        columns = round_up(k // width, 4)
        sizes = (round_up(rows, 128) * columns for rows in (m, n))
        first, second = (Argument((size,), (1,), dtype) for size in sizes)
        return first, second
    blocks = -(-k // BLOCK)
    first = Argument((m, blocks), (1, m), f32)
    if mode is Mode.BLOCK_1D and request.by == "torch v1":
        return first, Argument((blocks, n), (n, 1), f32)
    if mode is Mode.BLOCK_1D:
        return first, Argument((n, blocks), (1, n), f32)
    tall = round_up(blocks, 4)
    return first, Argument((tall, -(-n // BLOCK)), (1, tall), f32)


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple not below size."""
    return -(-size // multiple) * multiple
