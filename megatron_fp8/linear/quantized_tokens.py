"""Quantized tokens between ranks: a tensor subclass of codes and scales.

A row is one token: its codes, then the bytes of its scales. So code that moves rows, such as the permutations and
collectives of Megatron-Core's token dispatchers, moves tokens in FP8 without a change. Autograd sees a differentiable
matrix [..., features] of the values' dtype, and gradients have that shape. Each scale must belong to one token: scales
per row, or blocks of 1 x n.

The tensor does not compute. An operation that does more than move rows is an error, so no values are decoded
implicitly; ``dequantize`` decodes them. The experts' GEMMs read the codes that were sent (``side``).

wgrad reads blocks along the tokens. The sender cannot make those, because an expert's tokens come from several ranks. So
wgrad's codes are derived (``derived``): decoded exactly and quantized by wgrad's rule, which rounds once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..backends.native.layout import BLOCK_ROWS, round_up
from ..numerics.rule import Rule
from ..plan.site_plan import has_token_scales
from ..tensor import QuantizedSide

aten = torch.ops.aten


class QuantizedTokens(torch.Tensor):
    """Tokens [..., features] of nominal ``dtype``, in codes; made by ``of_side``.

    Attributes:
        rows: uint8 [..., features + bytes of a token's scales].
        rule: how they were quantized.

    Raises:
        RuntimeError: an operation would compute with it.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl
    rows: torch.Tensor
    rule: Rule

    @staticmethod
    def __new__(cls, rows: torch.Tensor, features: int, rule: Rule, dtype: torch.dtype) -> QuantizedTokens:
        shape = (*rows.shape[:-1], features)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=rows.device)
        self.rows, self.rule = rows, rule
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def of_side(
        cls, side: QuantizedSide, rule: Rule, shape: Sequence[int], dtype: torch.dtype
    ) -> QuantizedTokens:
        """The tokens [*shape] whose rowwise side, [tokens, features], this is. ValueError: a scale spans tokens."""
        if not has_token_scales(rule):
            raise ValueError(
                f"a scale per {rule.granularity} is not one token's: tokens travel with scales of rows or 1xN blocks"
            )
        side = side.plain()
        # Not ``contiguous()``, which keeps any stride of a single column of scales.
        scales = side.scale_inv.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        rows = torch.cat([side.codes.view(torch.uint8), scales], dim=1)
        return cls(rows.view(*shape[:-1], rows.shape[1]), side.codes.shape[1], rule, dtype)

    @property
    def side(self) -> QuantizedSide:
        """Codes [tokens, features] and scales, for a GEMM that sums over the features. Copies; the codes' memory has room
        for a multiple of 4 tokens."""
        features, rows = self.shape[-1], self.rows.reshape(-1, self.rows.shape[-1])
        room = rows.new_empty(round_up(len(rows), BLOCK_ROWS), features)
        codes, scales = room[: len(rows)].copy_(rows[:, :features]), rows[:, features:].contiguous()
        kind = torch.float8_e8m0fnu if self.rule.scale == "e8m0" else torch.float32
        return QuantizedSide(
            codes.view(self.rule.fmt.dtype),
            scales.view(kind),
            self.rule.granularity,
            self.rule.pow2,
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The decoded values, rounded once to dtype (default: the nominal one; exact in float32)."""
        return self.side.dequantize(dtype or self.dtype).view(self.shape)

    def apply_to_rows(self, send: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTokens:
        """The tokens after a function that moves rows was applied to their bytes."""
        return self._with(send(self.rows))

    def _with(self, rows: torch.Tensor, dtype: torch.dtype | None = None) -> QuantizedTokens:
        return QuantizedTokens(rows, self.shape[-1], self.rule, dtype or self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedTokens({list(self.shape)} of {self.dtype}, {self.rule}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        move = _MOVES.get(func)
        if move is None:
            raise RuntimeError(
                f"{func} on tokens that were dispatched in FP8: they are moved, and only the experts' products read them."
                " Take tokens.dequantize(), or set moe_fp8_dispatch=False"
            )
        return move(*args, **(kwargs or {}))


def _leading(tokens: QuantizedTokens, dim: int) -> int:
    """The dimension, counted from 0. RuntimeError if it is the features', which cannot be split."""
    dim %= tokens.ndim
    if dim == tokens.ndim - 1:
        raise RuntimeError(
            "tokens that were dispatched in FP8 are moved whole: their features cannot be taken apart"
        )
    return dim


def _same(tokens: QuantizedTokens, *_: Any, **__: Any) -> QuantizedTokens:
    return tokens._with(tokens.rows)


def _copied(tokens: QuantizedTokens, **_: Any) -> QuantizedTokens:
    return tokens._with(tokens.rows.clone(memory_format=torch.contiguous_format))


def _to_copy(
    tokens: QuantizedTokens, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> QuantizedTokens:
    """Changes the nominal dtype; codes and scales stay."""
    rows = tokens.rows if device is None else tokens.rows.to(device)
    return tokens._with(rows, dtype)


def _viewed(tokens: QuantizedTokens, size: Sequence[int]) -> QuantizedTokens:
    features = tokens.shape[-1]
    if not size or size[-1] not in (features, -1):
        raise RuntimeError(
            f"tokens [..., {features}] that were dispatched in FP8 cannot be seen as {list(size)}"
        )
    return tokens._with(tokens.rows.reshape(*size[:-1], tokens.rows.shape[-1]))


def _expanded(tokens: QuantizedTokens, size: Sequence[int], **_: Any) -> QuantizedTokens:
    if list(size) != list(tokens.shape):
        raise RuntimeError(
            f"tokens {list(tokens.shape)} that were dispatched in FP8 cannot be expanded to {list(size)}"
        )
    return _same(tokens)


def _transposed(tokens: QuantizedTokens, one: int, other: int) -> QuantizedTokens:
    return tokens._with(tokens.rows.transpose(_leading(tokens, one), _leading(tokens, other)))


def _selected(tokens: QuantizedTokens, dim: int, index: torch.Tensor) -> QuantizedTokens:
    return tokens._with(tokens.rows.index_select(_leading(tokens, dim), index))


def _gathered(tokens: QuantizedTokens, dim: int, index: torch.Tensor, **_: Any) -> QuantizedTokens:
    """Rows by one number each, which is expanded over the features: how the gradient of scatter_add reads them."""
    if tokens.ndim != 2 or index.stride(1) != 0:
        raise RuntimeError("tokens that were dispatched in FP8 are gathered whole, by one number a row")
    return _selected(tokens, dim, index[:, 0])


def _split(tokens: QuantizedTokens, sizes: Any, dim: int = 0) -> list[QuantizedTokens]:
    return [tokens._with(part) for part in tokens.rows.split(sizes, _leading(tokens, dim))]


def _sliced(
    tokens: QuantizedTokens, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> QuantizedTokens:
    return tokens._with(aten.slice.Tensor(tokens.rows, _leading(tokens, dim), start, end, step))


def _unsliced(
    grad: QuantizedTokens, size: Sequence[int], dim: int, start: int, end: int, step: int
) -> QuantizedTokens:
    """Gradient of a slice of all rows."""
    return _expanded(grad, size)


def _joined(parts: Sequence[Any], dim: int = 0) -> QuantizedTokens:
    first = next(part for part in parts if isinstance(part, QuantizedTokens))
    for part in parts:
        if (
            not isinstance(part, QuantizedTokens)
            or part.rule != first.rule
            or part.shape[-1] != first.shape[-1]
        ):
            raise RuntimeError(
                f"{first!r} cannot be joined with {part!r}: tokens dispatched in FP8 join their like"
            )
    return first._with(torch.cat([part.rows for part in parts], _leading(first, dim)))


_MOVES: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.view.default: _viewed,
    aten._unsafe_view.default: _viewed,
    aten.expand.default: _expanded,
    aten.clone.default: _copied,
    aten._to_copy.default: _to_copy,
    aten.transpose.int: _transposed,
    aten.index_select.default: _selected,
    aten.gather.default: _gathered,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.slice.Tensor: _sliced,
    aten.slice_backward.default: _unsliced,
    aten.cat.default: _joined,
}
"""Operations that move rows, in dispatchers and in their gradients."""
