"""RMSNorm and LayerNorm for Megatron-Core layer specs.

They compute in float32, return the input's dtype, and save for backward only the input and one or two statistics per
row. Their parameters have `sequence_parallel`, so Megatron-Core sums their gradients over the tensor-parallel group.
LayerNorm is PyTorch's; PyTorch's unfused RMSNorm saves four times as much (float32 copies).

An RMSNorm whose only reader is an FP8 linear on a GPU (activation.py sets it) does not write its result: it returns a
LazyTensor, which the linear's quantizing kernel computes. Both forwards save the same x, weight and statistic, so
backward is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import kernels
from ...kernels.lazy_tensor import LazyTensor, materialize
from ...linear.saved_operands import first_derivative_only


class _RMSNorm(torch.autograd.Function):
    """y = x / rms(x) * (w + offset), rms(x) = sqrt(mean(x^2) + eps) over the last dimension.

    `x * rstd` promotes a bfloat16 x to rstd's float32 during the read, without a float32 copy of x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, deferred: bool) -> Tensor:
        x = materialize(x)
        rstd = _rstd(x, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        if deferred:
            from ...kernels.fused_quantize import RmsNorm  # loads Triton

            return LazyTensor(RmsNorm(x.reshape(-1, x.shape[-1]), rstd.view(-1), weight, offset), x.shape)
        return _apply_scale(x, weight, rstd, offset)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        normed = x * rstd  # [..., hidden], float32
        dx = dw = None
        if ctx.needs_input_grad[0]:
            scaled = grads[0] * (weight.to(rstd.dtype) + ctx.offset)
            # [..., 1]: the gradient's component along the normed row, which the norm removes
            along = torch.linalg.vecdot(scaled, normed).unsqueeze(-1) / x.shape[-1]
            dx = torch.addcmul(scaled, normed, along, value=-1).mul_(rstd).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = normed.mul_(grads[0]).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        return dx, dw, None, None, None


def _apply_scale(x: Tensor, weight: Tensor, rstd: Tensor, offset: float) -> Tensor:
    return (x * rstd).mul_(weight.to(rstd.dtype) + offset).to(x.dtype)


def _rstd(x: Tensor, eps: float) -> Tensor:
    """Returns 1 / rms(x), [..., 1]; on GPUs with one kernel, so that the norm has the same bits fused or not."""
    if kernels.run_on(x.device) and x.dtype != torch.float64:
        from ...kernels.fused_quantize import row_rstd  # loads Triton

        return row_rstd(x.reshape(-1, x.shape[-1]), eps).view(*x.shape[:-1], 1)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=compute).square_()
    return squares.div_(x.shape[-1]).add_(eps).rsqrt_()


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    *,
    deferred: bool = False,
) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x [..., hidden], any float dtype; weight [hidden]; with `zero_centered_gamma` the factor is 1 + weight. Computes
    in float32 (float64 for float64 input); the result has x's shape and dtype. A row with a NaN is all NaN; a row
    with an Inf is NaN at the Inf and 0 elsewhere; a row of zeros is 0.

    With `deferred` the result is a LazyTensor: the same bits, computed by its reader. Kernels must run on x's
    device, and x must not be float64.
    """
    if not (deferred or torch.is_grad_enabled()):  # for one token the autograd function would double the time
        x = materialize(x)
        return _apply_scale(x, weight, _rstd(x, eps), float(zero_centered_gamma))
    return _RMSNorm.apply(x, weight, eps, float(zero_centered_gamma), deferred)


class Norm(torch.nn.Module):
    """The norm that `config.normalization` names, with the arguments of Megatron-Core's WrappedTorchNorm.

    weight [hidden_size], and for LayerNorm bias [hidden_size], in config.params_dtype, initialised to the identity.
    `config.layernorm_zero_centered_gamma` stores weight - 1.

    Raises ValueError for a normalization other than 'RMSNorm' and 'LayerNorm'.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
        **kwargs: Any,
    ):
        super().__init__()
        # As in Megatron-Core's own norms the config decides, not the arguments; layers pass the config's values.
        self.kind = kind = config.normalization
        self.reader_takes_codes: Callable[[], bool] | None = None  # set by activation.connect
        if kind not in ("RMSNorm", "LayerNorm"):
            raise ValueError(f"normalization={kind!r} is not supported; use 'RMSNorm' or 'LayerNorm'")
        self.hidden_size, self.eps = hidden_size, eps
        self.zero_centered_gamma = bool(config.layernorm_zero_centered_gamma or zero_centered_gamma)
        dtype, device = config.params_dtype, _parameter_device(config)
        first = 0.0 if self.zero_centered_gamma else 1.0
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), first, dtype=dtype, device=device))
        self.bias: torch.nn.Parameter | None = None
        if kind == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=dtype, device=device))
        for parameter in self.parameters():
            # Read by finalize_model_grads: under SP each rank sees only its part of the sequence.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size] -> same shape and dtype; a LazyTensor if its only reader makes codes of it."""
        if self.kind == "RMSNorm":
            deferred = self.reader_takes_codes is not None and self.reader_takes_codes()
            return rms_norm(x, self.weight, self.eps, self.zero_centered_gamma, deferred=deferred)
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return F.layer_norm(x, (self.hidden_size,), weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """hidden size, eps and kind, for print(model)."""
        return (
            f"{self.hidden_size}, eps={self.eps}, {self.kind}, zero_centered_gamma={self.zero_centered_gamma}"
        )


def _parameter_device(config: Any) -> torch.device:
    if config.use_cpu_initialization or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
