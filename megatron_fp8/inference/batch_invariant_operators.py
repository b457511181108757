"""Torch's operators on CPUs with each row by itself, as a dispatch mode.

Rows are slices along the last dimension. Matrix products go through kernels/gemms.py. Pointwise functions and sums over
a row are called once for each row, attention and convolutions once for each sequence, always on copies: the same shapes
at the same alignment, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..kernels.gemms import matmul_batch_invariant

aten = torch.ops.aten
Operator = Callable[..., Any]


class BatchInvariantMode(TorchDispatchMode):
    """Inside, this thread's torch operators on CPUs treat each row, and attention each sequence, by itself."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator by its table's entry, if there is one. Raises ValueError for those of ``_REFUSED``."""
        kwargs = kwargs or {}
        if func.overloadpacket in _REFUSED:
            raise ValueError(
                f"{func} under batch_invariant=True: its kernel depends on the batch, and is not replaced:"
                f" {_REFUSED[func.overloadpacket]}"
            )
        run = _TABLE.get(func.overloadpacket)
        if run is not None and "out" not in kwargs and isinstance(args[0], torch.Tensor):
            return run(func, *args, **kwargs)
        if func._can_decompose():  # in inference mode operators arrive whole
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


def _rows(x: torch.Tensor) -> list[torch.Tensor]:
    """Each row of x [..., K] as a tensor of its own, [1, K]."""
    return _entries(x.reshape(-1, x.shape[-1]))


def _pointwise(func: Operator, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """An operator of each element; other arguments are numbers."""
    if x.dim() < 1 or not x.numel() or any(isinstance(other, torch.Tensor) for other in args):
        return func(x, *args, **kwargs)
    done = [func(row, *args, **kwargs) for row in _rows(x)]
    y = torch.cat(done).view(x.shape)
    return x.copy_(y) if func._schema.is_mutable else y  # type: ignore[attr-defined]


def _over_a_row(func: Operator, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A reduction, if it is over the last dimension alone."""
    names = [argument.name for argument in func._schema.arguments]  # type: ignore[attr-defined]
    given = {**dict(zip(names[1:], args, strict=False)), **kwargs}
    dim = given.get("dim")
    dims = [dim] if isinstance(dim, int) else dim
    if not x.numel() or x.dim() < 2 or not dims or len(dims) > 1 or dims[0] % x.dim() != x.dim() - 1:
        return func(x, *args, **kwargs)
    keeps = given.get("keepdim", "keepdim" not in names)
    given |= {"dim": [1] if isinstance(dim, (list, tuple)) else 1}
    given |= {"keepdim": True} if "keepdim" in names else {}
    y = torch.cat([func(row, **given) for row in _rows(x)]).view(*x.shape[:-1], -1)
    return y if keeps else y.squeeze(-1)


def _convolution(func: Operator, x: torch.Tensor, *args: Any) -> Any:
    """A convolution of x [b, channels, ...]."""
    if not len(x):
        return func(x, *args)
    return torch.cat([func(own, *args) for own in _entries(x)])


def _attention(func: Operator, *args: Any, attn_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
    """Attention of q, k and v [b, heads, s, d]; attn_mask [s, s] or [b or 1, heads or 1, s, s]."""
    (q, k, v), options = args[:3], args[3:]
    if not len(q):
        return func(*args, attn_mask=attn_mask, **kwargs)
    masks: Sequence[torch.Tensor | None] = [attn_mask] * len(q)
    if attn_mask is not None and attn_mask.dim() == 4 and len(attn_mask) > 1:
        masks = _entries(attn_mask)
    parts = zip(_entries(q), _entries(k), _entries(v), masks, strict=True)
    done = [func(*own, *options, attn_mask=mask, **kwargs) for *own, mask in parts]
    return tuple(torch.cat(results) for results in zip(*done, strict=True))


def _entries(x: torch.Tensor) -> list[torch.Tensor]:
    """Each entry of x [b, ...] as a tensor of its own, [1, ...]."""
    return [one.clone(memory_format=torch.contiguous_format) for one in x.split(1)]


def _mm(func: Operator, a: torch.Tensor, b: torch.Tensor, out_dtype: Any = None) -> torch.Tensor:
    """a [M, K] @ b [K, N]."""
    return matmul_batch_invariant(a, b.t(), out_dtype or a.dtype)


def _mv(func: Operator, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [K]."""
    return matmul_batch_invariant(a, b.unsqueeze(0), a.dtype).squeeze(1)


def _linear(
    func: Operator, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., K] @ w [N, K]^T + bias [N]."""
    y = matmul_batch_invariant(x.reshape(-1, x.shape[-1]), w, x.dtype, bias)
    return y.view(*x.shape[:-1], len(w))


def _addmm(
    func: Operator, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    """beta * c + alpha * (a [M, K] @ b [K, N])."""
    if c.dim() == 1 and beta == alpha == 1:
        return matmul_batch_invariant(a, b.t(), a.dtype, c)
    y = matmul_batch_invariant(a, b.t(), a.dtype)
    y = y if alpha == 1 else y * alpha
    return y if beta == 0 else y + (c if beta == 1 else c * beta)


def _bmm(func: Operator, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [B, M, K] @ b [B, K, N]."""
    if not len(a):
        return a.new_empty(0, a.shape[1], b.shape[2])
    return torch.stack(
        [matmul_batch_invariant(*pair, a.dtype) for pair in zip(a, b.mT.contiguous(), strict=True)]
    )


def _baddbmm(
    func: Operator, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    """beta * c + alpha * (a [B, M, K] @ b [B, K, N])."""
    y = _bmm(func, a, b)
    y = y if alpha == 1 else y * alpha
    return y if beta == 0 else y + (c if beta == 1 else c * beta)


# fmt: off
_POINTWISE = (
    "silu", "gelu", "sigmoid", "tanh", "softplus", "mish", "elu", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p",
    "pow", "rsqrt", "erf", "erfc", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
)
# fmt: on
_TABLE: dict[Any, Operator] = {
    aten.mm: _mm,
    aten.mv: _mv,
    aten.linear: _linear,
    aten.addmm: _addmm,
    aten.bmm: _bmm,
    aten.baddbmm: _baddbmm,
    aten.convolution: _convolution,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    **{
        getattr(aten, name): _over_a_row
        for name in ("mean", "sum", "linalg_vector_norm", "var", "std", "prod", "logsumexp")
    },
    **{getattr(aten, name): _pointwise for name in _POINTWISE},
    **{getattr(aten, f"{name}_"): _pointwise for name in _POINTWISE if hasattr(aten, f"{name}_")},
}
_FAST_PATH = "call torch.backends.mha.set_fastpath_enabled(False) first"
_REFUSED: dict[Any, str] = {
    aten._transformer_encoder_layer_fwd: _FAST_PATH,
    aten._native_multi_head_attention: _FAST_PATH,
    aten._trilinear: "nn.Bilinear cannot be used",
    aten.addmv: "write it as a matrix-vector product and a sum",
}
"""Operators that choose kernels by the batch -> the remedy."""
