"""A linear's GEMM with an inference engine's operands: its weight, its input cast.

Both operands are decoded to float32 and multiplied there. Products of codes are exact in float32, so this differs from an
FP8 GEMM, training's or the engine's, only in the order of sums and in where scales are applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..backends import emulated
from ..backends.base import CastRequest
from ..kernels.gemms import matmul_high_precision
from ..linear.gemm_site import GemmSite
from ..numerics.formats import E2M1, E4M3
from ..numerics.nvfp4 import LARGEST
from ..numerics.rule import BLOCK_1X16, BLOCK_1X32, BLOCK_1X128, ROW, TENSOR, Rule
from ..tensor import Operand

InputCast = Callable[[torch.Tensor], torch.Tensor]
"""x [M, K] -> the values of its codes, float32 [M, K]."""

_RULES = {
    str(rule): rule
    for rule in (
        Rule(E4M3, TENSOR),
        Rule(E4M3, ROW),
        Rule(E4M3, BLOCK_1X128),
        Rule(E4M3, BLOCK_1X128, "pow2"),
        Rule(E4M3, BLOCK_1X32, "e8m0"),
        Rule(E2M1, BLOCK_1X16, "e4m3"),
    )
}
STATIC = "e4m3 tensor static"
_IN_BF16 = {"e4m3 row bf16": 1, "e4m3 tensor bf16": None, STATIC: None}


def input_cast(rule: str, scales: Sequence[torch.Tensor], in_bf16: bool = False) -> InputCast:
    """The cast of a linear's input.

    Args:
        rule: of engine_rules.input_rule.
        in_bf16: of engine_rules.computes_in_bf16.
        scales: static scales of the parts that the engine multiplies as one, as factors of the codes, float32 [1] or []
            each. The engine takes the largest.
    """
    largest = torch.stack([each.reshape(()) for each in scales]).max() if scales else None
    if in_bf16 and rule in _IN_BF16:
        return partial(_cast_in_dtype, dim=_IN_BF16[rule], scale_inv=largest)
    if rule == STATIC:
        assert largest is not None
        return partial(_cast, rule=Rule(E4M3, TENSOR), scale=1 / largest)
    found = _RULES[rule]
    return partial(_cast, rule=found, amax=None if largest is None else largest * LARGEST)


def _cast(
    x: torch.Tensor, rule: Rule, scale: torch.Tensor | None = None, amax: torch.Tensor | None = None
) -> torch.Tensor:
    reduce_amax = None if amax is None else (lambda found: found.fill_(amax.item()))
    to_device = None if scale is None else scale.to(x.device)
    request = CastRequest(x, rule, "rowwise", scale=to_device, reduce_amax=reduce_amax)
    (done,) = emulated.quantize_each([request])
    side = done.tensor.rowwise
    assert side is not None
    # E2M1 has no NaN, and must not hide one.
    return side.dequantize(torch.float32).masked_fill_(x.isnan(), torch.nan)


def _cast_in_dtype(x: torch.Tensor, dim: int | None, scale_inv: torch.Tensor | None) -> torch.Tensor:
    """In E4M3, with scale_inv, quotients and values rounded to x's dtype."""
    if scale_inv is None:
        scale_inv = (x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)) / E4M3.max
    scale_inv = scale_inv.to(x.device, x.dtype)
    scale_inv = scale_inv.where(scale_inv > 0, torch.finfo(x.dtype).eps)
    codes = (x / scale_inv).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype)
    return (codes.to(x.dtype) * scale_inv).to(torch.float32)


class EngineSite(GemmSite):
    """`site.replaced_by(EngineSite(site, ...))` multiplies decoded operands, of training or of an engine.

    Args:
        site: whose quantizers cast what is not given.
        quantized: whether training's fprop is quantized; False: its operands are in high precision.
        weight: the engine's, [N, K], of any dtype; None: training's.
        cast: the engine's cast of the input; None with a weight of the engine's: high precision.
        inputs: whether the input is the engine's.
    """

    def __init__(
        self,
        site: GemmSite,
        quantized: bool,
        *,
        weight: torch.Tensor | None = None,
        inputs: bool = False,
        cast: InputCast | None = None,
    ) -> None:
        taken = {"input": not inputs, "weight": weight is None}
        operands: dict[str, Any] = {
            gemm: {
                role: spec if quantized and gemm == "fprop" and taken.get(role, False) else None
                for role, spec in casts.items()
            }
            for gemm, casts in site.plan.operands.items()
        }
        super().__init__(replace(site.plan, operands=operands, precision="fp8"), site.state, None, of=site)
        self._weight, self._cast = weight, cast

    def multiply(
        self,
        gemm: str,
        a: Operand,
        b: Operand,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        *,
        record: bool = True,
    ) -> torch.Tensor:
        """a [M, K] @ b [N, K]^T (+ bias [N]) = [M, N], summed in float32 and rounded once."""
        assert gemm == "fprop", "an engine has no backward"
        x = self._cast(a) if self._cast is not None and isinstance(a, torch.Tensor) else _decoded(a)
        weight = _decoded(b) if self._weight is None else self._weight.to(x.device, torch.float32)
        return matmul_high_precision(x, weight, out_dtype, bias)


def _decoded(operand: Operand) -> torch.Tensor:
    """float32."""
    if isinstance(operand, torch.Tensor):
        return operand.to(torch.float32)
    return operand.dequantize(torch.float32)
