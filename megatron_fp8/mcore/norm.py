"""RMSNorm and LayerNorm for Megatron-Core layer specs.

They compute in float32, answer in the input's dtype, save for backward only the input and one or two statistics per
row (PyTorch's eager RMSNorm under bfloat16 saves several float32 copies), and their parameters carry
`sequence_parallel`, so Megatron-Core sums their gradients over the tensor-parallel group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _RMSNorm(torch.autograd.Function):
    """y = x / rms(x) * w, rms(x) = sqrt(mean(x^2) + eps) over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        compute = _compute_dtype(x)
        xf = x.to(compute)
        rstd = torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return (xf * rstd * (weight.to(compute) + offset)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        g = grads[0].to(rstd.dtype)
        normed = x.to(rstd.dtype) * rstd
        dx = dw = None
        if ctx.needs_input_grad[0]:
            gw = g * (weight.to(rstd.dtype) + ctx.offset)
            dx = ((gw - normed * (gw * normed).mean(-1, keepdim=True)) * rstd).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = _sum_rows(g * normed).to(weight.dtype)
        return dx, dw, None, None


class _LayerNorm(torch.autograd.Function):
    """y = (x - mean(x)) / std(x) * w + b, std(x) = sqrt(var(x) + eps) over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, offset: float) -> Tensor:
        compute = _compute_dtype(x)
        xf = x.to(compute)
        # Two passes: E[x^2] - E[x]^2 loses everything where the mean is large against the spread.
        mean = xf.mean(-1, keepdim=True)
        centred = xf - mean
        rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.offset, ctx.bias_dtype = offset, bias.dtype
        return (centred * rstd * (weight.to(compute) + offset) + bias.to(compute)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        g = grads[0].to(rstd.dtype)
        dx = dw = db = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            normed = (x.to(rstd.dtype) - mean) * rstd
        if ctx.needs_input_grad[0]:
            gw = g * (weight.to(rstd.dtype) + ctx.offset)
            spread = normed * (gw * normed).mean(-1, keepdim=True)
            dx = ((gw - gw.mean(-1, keepdim=True) - spread) * rstd).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = _sum_rows(g * normed).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            db = _sum_rows(g).to(ctx.bias_dtype)
        return dx, dw, db, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, zero_centered_gamma: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x [..., hidden], any float dtype; weight [hidden]; with `zero_centered_gamma` the factor is 1 + weight. Computes
    in float32 (float64 for float64 input); the result has x's shape and dtype. A row with a NaN is NaN throughout; a
    row with an Inf is NaN at the Inf and 0 elsewhere; a row of zeros is 0.
    """
    return _RMSNorm.apply(x, weight, eps, float(zero_centered_gamma))


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, zero_centered_gamma: bool = False
) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension; otherwise as `rms_norm`.

    A row with a NaN or an Inf is NaN throughout; a constant row is `bias`.
    """
    return _LayerNorm.apply(x, weight, bias, eps, float(zero_centered_gamma))


class Norm(torch.nn.Module):
    """The norm that `config.normalization` names, with the arguments of Megatron-Core's WrappedTorchNorm.

    weight [hidden_size], and for LayerNorm bias [hidden_size], in config.params_dtype; initial output: unscaled,
    unshifted. `config.layernorm_zero_centered_gamma` stores weight - 1.

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
        # Megatron-Core's own norms obey the config and ignore the arguments; layers pass only the config's values.
        kind = config.normalization
        if kind not in ("RMSNorm", "LayerNorm"):
            raise ValueError(f"normalization={kind!r} is not supported; use 'RMSNorm' or 'LayerNorm'")
        self.hidden_size, self.eps = hidden_size, eps
        self.zero_centered_gamma = bool(config.layernorm_zero_centered_gamma or zero_centered_gamma)
        options = {"dtype": config.params_dtype, "device": _parameter_device(config)}
        first = 0.0 if self.zero_centered_gamma else 1.0
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), first, **options))
        self.register_parameter(
            "bias", torch.nn.Parameter(torch.zeros(hidden_size, **options)) if kind == "LayerNorm" else None
        )
        for parameter in self.parameters():
            # Read by finalize_model_grads: under SP each rank sees only its part of the sequence.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size] -> same shape and dtype."""
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)
        return layer_norm(x, self.weight, self.bias, self.eps, self.zero_centered_gamma)

    def extra_repr(self) -> str:
        """hidden size, eps and kind, for print(model)."""
        kind = "RMSNorm" if self.bias is None else "LayerNorm"
        return f"{self.hidden_size}, eps={self.eps}, {kind}, zero_centered_gamma={self.zero_centered_gamma}"


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _sum_rows(x: Tensor) -> Tensor:
    """[..., hidden] -> [hidden]."""
    return x.reshape(-1, x.shape[-1]).sum(0)


def _parameter_device(config: Any) -> torch.device:
    if config.use_cpu_initialization or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
