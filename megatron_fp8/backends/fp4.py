"""NVFP4 on any device: casts of one or both directions, and products, by numerics/nvfp4.py.

Two codes share a byte along the contraction, so a columnwise side is contiguous in its own orientation, never a
transposed view. Its codes of 16x16 blocks are those of the rowwise side, transposed.

On CPUs C casts (kernels/cpu/fp4.c), and its products decode codes as they pack them (gemm.c); what C does not take goes
through torch, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..kernels import cast_dispatch
from ..kernels.cast_dispatch import in_memory
from ..kernels.cpu import emulation
from ..kernels.cpu import fp4 as cpu_fp4
from ..kernels.cpu.emulation import Operand
from ..kernels.gemms import finish, matmul_fp32
from ..numerics import nvfp4
from ..numerics.cast import chunks
from ..numerics.rule import Rule
from ..numerics.subnormals import keep_subnormals
from ..tensor import Float8Tensor, QuantizedSide, expand_scale
from .base import CastRequest, CastResult, Region


@keep_subnormals
def quantize(request: CastRequest) -> CastResult:
    """``reference.quantize`` of an E2M1 rule. NaN is cast as 0, Inf saturates; both are counted."""
    x, rule, direction, static, running, reduce_amax, region, _ = request
    assert region is not None or not rule.stochastic, (
        "stochastic rounding needs a region to draw its bits from"
    )
    region = region if rule.stochastic else None
    x = in_memory(x).contiguous()
    if cpu_fp4.takes(x):
        return _in_c(request._replace(x=x, region=region))
    block, symmetric = rule.granularity, rule.granularity.symmetric
    (of_blocks,), nonfinite = cast_dispatch.block_amaxes(x, [(block.rows, block.cols)])
    turned, of_turned, hadamard = x, of_blocks, rule.hadamard
    if direction != "rowwise" and not symmetric:
        turned = nvfp4.hadamard(x.t()) if hadamard else x.t().contiguous()
        (of_turned,), _ = cast_dispatch.block_amaxes(turned, [(block.rows, block.cols)])
    amaxes = torch.stack([_largest(of_blocks), _largest(of_turned)])
    own = amaxes[0].clone()
    if reduce_amax is not None:
        reduce_amax(amaxes)
    amaxes = amaxes if static is None else static.expand(2)
    rowwise = columnwise = None
    if direction != "columnwise" or symmetric:
        draws = None if region is None else _bytes(region, len(x), x.shape[1], x.device, columnwise=False)
        rowwise = _side(x, of_blocks, amaxes[0], rule, draws)
    if direction != "rowwise" and symmetric:
        assert rowwise is not None
        columnwise = rowwise.transposed()
    elif direction != "rowwise":
        draws = None
        if region is not None:
            draws = _bytes(region, nvfp4.padded_cols(len(x)), x.shape[1], x.device, columnwise=True).t()
        side = _side(turned, of_turned, amaxes[1], rule, draws)
        columnwise = replace(side, padding=side.codes.shape[1] * 2 - len(x), hadamard=hadamard)
    if running is not None:
        running.record(own, nonfinite)
    return CastResult(
        Float8Tensor(None if direction == "columnwise" else rowwise, columnwise, x.dtype), own, nonfinite
    )


def _in_c(request: CastRequest) -> CastResult:
    """``quantize`` of a matrix that C takes."""
    x, rule, direction, static, running, reduce_amax, region, _ = request
    amaxes = cpu_fp4.find_amaxes(x, rule, direction)
    own = amaxes.tensor[0].clone()
    if reduce_amax is not None:
        reduce_amax(amaxes.tensor)
    if static is not None:
        amaxes.tensor.fill_(static)
    draws = None
    if region is not None:
        step = region.total_cols or x.shape[1]
        draws = cpu_fp4.Draws(region.key, region.row_offset * step + region.col_offset, step)
    made = cpu_fp4.encode(x, rule, direction, amaxes, draws)
    sides = [
        None
        if one is None
        else QuantizedSide(
            one.codes.view(rule.fmt.dtype),
            one.scales,
            rule.granularity,
            False,
            True,
            padding=nvfp4.padded_cols(cols) - cols,
            tensor_amax=amax,
            hadamard=hadamard,
        )
        for one, cols, amax, hadamard in zip(
            made, (x.shape[1], x.shape[0]), amaxes.tensor, (False, rule.hadamard), strict=True
        )
    ]
    nonfinite = torch.tensor(amaxes.nonfinite, dtype=torch.int64, device="cpu") if amaxes.nonfinite else None
    if running is not None:
        running.record(own, nonfinite)
    rowwise = None if direction == "columnwise" else sides[0]
    return CastResult(Float8Tensor(rowwise, sides[1], x.dtype), own, nonfinite)


def _largest(amaxes: torch.Tensor) -> torch.Tensor:
    """float32 []; 0 of none."""
    return amaxes.amax() if amaxes.numel() else amaxes.new_zeros(())


def _bytes(region: Region, rows: int, cols: int, device: torch.device, *, columnwise: bool) -> torch.Tensor:
    """The random byte of each element, uint8 [rows, cols]."""
    return nvfp4.random_bytes(region.index(rows, cols, device), region.key, columnwise=columnwise)


def _side(
    x: torch.Tensor, block_amax: torch.Tensor, amax: torch.Tensor, rule: Rule, draws: torch.Tensor | None
) -> QuantizedSide:
    """Codes and scales of x [rows, cols], quantized along cols.

    Args:
        block_amax: float32, of each block.
        amax: float32 [], of the tensor.
        draws: uint8 [rows, cols at least], for stochastic rounding.
    """
    (rows, cols), height = x.shape, rule.granularity.rows
    # S_enc is 1 for Inf and for 2688; with 2688 the product saturates as the codes do.
    amax = torch.where(amax.isinf(), nvfp4.LARGEST, amax)
    scales = nvfp4.block_scales(block_amax, amax)
    factors = nvfp4.encoding_factors(scales, amax)
    codes = torch.empty((rows, nvfp4.padded_cols(cols) // 2), dtype=torch.uint8, device=x.device)
    for part in chunks(-(-rows // height), x.numel(), x.device):
        lines = slice(part.start * height, part.stop * height)
        scaled = x[lines].to(torch.float32)
        scaled = scaled * expand_scale(factors[part], rule.granularity, scaled.shape)
        of_codes = nvfp4.encode(scaled, None if draws is None else draws[lines, :cols])
        codes[lines] = nvfp4.pack(nvfp4.pad(of_codes)).view(torch.uint8)
    packed = codes.view(rule.fmt.dtype)
    padding = nvfp4.padded_cols(cols) - cols
    return QuantizedSide(packed, scales, rule.granularity, False, True, padding=padding, tensor_amax=amax)


def operands(a: QuantizedSide, b: QuantizedSide) -> tuple[Operand, Operand]:
    """C's operands for sides a [M, K] and b [N, K], one or both of them NVFP4: codes, or decoded values if C's inner loop
    does not decode them. a's scale is the tensors' factor."""
    dtype = _work_dtype(a, b)
    return _operand(a, dtype)._replace(scale=tensor_factor(a, b)), _operand(b, dtype)


def _operand(side: QuantizedSide, dtype: torch.dtype) -> Operand:
    in_loop = dtype == torch.bfloat16 and emulation.inner_loop() in (emulation.AVX512, emulation.AMX)
    if side.tensor_amax is None or not (
        in_loop and emulation.is_plain(side.codes) and emulation.is_plain(side.scale_inv)
    ):
        return Operand(_values(side, dtype))
    return Operand(side.codes, fp4_scale=side.scale_inv, fp4_rows=side.granularity.rows)


def gemm(
    a: QuantizedSide,
    b: QuantizedSide,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    exact: bool,
    *,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda a, b: a @ b.t(),
) -> torch.Tensor:
    """``emulated.gemm`` in torch of sides of which one is NVFP4, or both: sums of codes times block scales, then one
    float32 factor, the bias [N], one rounding.

    Args:
        a: [M, K]; b: [N, K].
        multiply: the product of float64 values, if ``exact``.
    """
    alpha = tensor_factor(a, b)
    if exact:
        values_a, values_b = (_values(side, torch.float64) for side in (a, b))
        return finish(multiply(values_a, values_b), alpha.to(torch.float64), bias, out_dtype)
    dtype = _work_dtype(a, b)
    return finish(matmul_fp32(_values(a, dtype), _values(b, dtype)), alpha, bias, out_dtype)


def has_few_rows(a: QuantizedSide, b: QuantizedSide, out_dtype: torch.dtype) -> bool:
    """Whether a @ b^T is for ``multiply_few_rows``."""
    return (
        b.tensor_amax is not None
        and b.granularity.symmetric
        and cpu_fp4.takes_few_rows(a.codes.shape[0], b.codes, b.scale_inv, out_dtype)
        and _work_dtype(a, b) == torch.bfloat16
    )


def multiply_few_rows(
    a: QuantizedSide, b: QuantizedSide, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor | None:
    """``emulated.gemm`` for at most 16 rows, such as decoded tokens. Reads b's codes once, without a copy. None if the
    tensors' factor is too small or large for C. bias: float32 [N]."""
    values = _values(a, torch.bfloat16).contiguous()
    return cpu_fp4.multiply_few_rows(values, b.codes, b.scale_inv, tensor_factor(a, b), bias, out_dtype)


def _work_dtype(a: QuantizedSide, b: QuantizedSide) -> torch.dtype:
    """bfloat16 where it holds all ``_values`` exactly, else float32."""
    short = all(side.tensor_amax is not None or side.pow2 for side in (a, b))
    return torch.bfloat16 if short else torch.float32


def _values(side: QuantizedSide, dtype: torch.dtype) -> torch.Tensor:
    """[rows, cols padded with zeros to whole blocks]: NVFP4's codes times their blocks' scales, exact in bfloat16; the
    decoded values of another side."""
    if side.tensor_amax is None:
        return nvfp4.pad(side.dequantize(dtype))
    if dtype == torch.bfloat16 and emulation.usable(side.codes) and emulation.readable(side.scale_inv):
        return cpu_fp4.decode(side.codes, side.scale_inv.contiguous(), side.granularity.rows)
    values = nvfp4.values(side.codes, dtype)
    return values.mul_(expand_scale(side.scale_inv.to(dtype), side.granularity, values.shape))


@keep_subnormals
def tensor_factor(a: QuantizedSide, b: QuantizedSide) -> torch.Tensor:
    """float32 []: the product of both tensors' amaxes over 2688^2; over 2688 where one side is NVFP4."""
    amaxes = [side.tensor_amax for side in (a, b) if side.tensor_amax is not None]
    amax = amaxes[0] * amaxes[1] if len(amaxes) == 2 else amaxes[0]
    return amax / torch.full_like(amax, nvfp4.LARGEST ** len(amaxes))
