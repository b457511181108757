"""Pads tokens to the kernels' alignment and removes the padding.

A prompt has any number of tokens, and decoding has one. FP8 tensor cores prefer multiples of 16 rows, or 32
(recipe.py, alignment); sizes that they do not support are padded inside the backend's GEMM. Here whole
activations are padded before quantisation, so that a kernel gets few different sizes. Zeros do not change an
amax or scale, and rows are independent in y = x @ w^T, so the result is the same. The emulated backend does
not benefit and is excluded.
"""

from __future__ import annotations

from typing import Any

import torch


def pad_tokens(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """x [..., K] as [M, 1, K], with rows of zeros up to a multiple M; x itself if no padding is needed."""
    rows = x.shape[:-1].numel()
    missing = -rows % multiple
    if not missing:
        return x
    flat = x.reshape(rows, x.shape[-1])  # [tokens, K]
    return torch.cat([flat, flat.new_zeros(missing, flat.shape[1])]).unsqueeze(1)  # [M, 1, K]


class Padding:
    """Forward hooks of one linear: pad the input to a multiple of ``multiple`` tokens, then slice and reshape
    the output.

    The output may be a tensor, or a tuple that begins with it (Megatron-Core's linears).
    """

    def __init__(self, linear: Any, multiple: int):
        self.multiple = multiple
        self._shapes: list[torch.Size | None] = []
        linear.register_forward_pre_hook(self._before)
        linear.register_forward_hook(self._after, always_call=True)

    def _before(self, linear: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        padded = pad_tokens(args[0], self.multiple)
        self._shapes.append(None if padded is args[0] else args[0].shape)
        return (padded, *args[1:])

    def _after(self, linear: Any, args: tuple[Any, ...], output: Any) -> Any:
        shape = self._shapes.pop()
        if shape is None or output is None:
            return None
        if isinstance(output, tuple):
            return (_cut(output[0], shape), *output[1:])
        return _cut(output, shape)


def _cut(y: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """y [M, ..., N] without the added rows, in the leading dimensions of ``shape`` [..., K]."""
    rows = shape[:-1].numel()
    return y.reshape(-1, y.shape[-1])[:rows].reshape(*shape[:-1], y.shape[-1])
