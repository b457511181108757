"""Padding of tokens to the kernels' alignment, and back.

A prompt has any number of tokens, and decoding has one. FP8 tensor cores like multiples of 16 rows, or 32 (recipe.py,
alignment); sizes that they cannot take at all a backend pads inside its own GEMM. Here whole activations are padded
before they are quantised, so that a kernel meets few different sizes. Zeros change no amax, hence no scale, and rows
do not meet in y = x @ w^T: the result is the same. The emulated backend gains nothing by it, and is left alone.
"""

from __future__ import annotations

from typing import Any

import torch


def pad_tokens(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """x [..., K] as [M, 1, K], rows of zeros added so that M is a multiple; x itself if its rows are one already."""
    rows = x.shape[:-1].numel()
    missing = -rows % multiple
    if not missing:
        return x
    flat = x.reshape(rows, x.shape[-1])  # [tokens, K]
    return torch.cat([flat, flat.new_zeros(missing, flat.shape[1])]).unsqueeze(1)  # [M, 1, K]


class Padding:
    """Forward hooks of one linear: its input padded to a multiple of ``multiple`` tokens, its output cut and shaped back.

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
