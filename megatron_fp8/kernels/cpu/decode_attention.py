"""Attention of one query to a KV cache in C (decode_attention.c), as in decoding.

In torch's operations it is a dozen for each sequence, since a cache's tokens lie side by side and its products want
them head by head: with eight sequences those took as long as the layer's linears in FP8.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from . import emulation


class Cache(ctypes.Structure):
    """decode_attention.c's."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("token_step", "sequence_step", "group_step")),
        *((name, ctypes.c_int64) for name in ("tokens", "sequences", "groups", "heads", "width")),
    )


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether ``attend`` takes these: not small, all in float32 or all in bfloat16, a row's numbers side by side."""
    return (
        k.numel() >= emulation.MIN_ELEMENTS
        and q.dtype in (torch.float32, torch.bfloat16)
        and q.dtype == k.dtype == v.dtype
        and all(emulation.readable(x) for x in (q, k, v))
        and k.stride(-1) == v.stride(-1) == 1
        and v.numel() > 0
        and emulation.reason() is None
    )


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(q k^T * scale) v in float32, rounded once: [sequences, heads, dv] in q's dtype.

    NaN and Inf go where torch's operations have them. A sequence's result does not depend on those beside it.

    Args:
        q: [sequences, heads, d]; the heads of a group lie one after the other.
        k, v: [tokens, sequences, groups, d] and [..., dv]; any strides but the last.
    """
    (tokens, sequences, groups, width), heads = v.shape, q.shape[1]
    wanted = (tokens, sequences, groups, q.shape[2])
    assert k.shape == wanted and len(q) == sequences and heads % groups == 0, (q.shape, k.shape, v.shape)
    query = (q.to(torch.float32) * scale).contiguous()
    scores = torch.empty(sequences, heads, tokens, dtype=torch.float32, device="cpu")
    sums = torch.empty(sequences, heads, width, dtype=torch.float32, device="cpu")
    multiply, add = _functions(q.dtype)
    threads = emulation.thread_count(k.numel())
    multiply(
        ctypes.byref(_cache(k, heads)),
        emulation.address(query, torch.float32, q.numel()),
        emulation.address(scores, torch.float32, scores.numel()),
        threads,
    )
    weights = scores.softmax(-1)
    add(
        ctypes.byref(_cache(v, heads)),
        emulation.address(weights, torch.float32, scores.numel()),
        emulation.address(sums, torch.float32, sums.numel()),
        threads,
    )
    return sums.to(q.dtype)


@cache
def _functions(dtype: torch.dtype) -> tuple[Callable[..., None], Callable[..., None]]:
    library, name = emulation.compiled(), emulation.NAMES[dtype]
    found = getattr(library, f"{name}_scores"), getattr(library, f"{name}_values")
    for function in found:
        function.restype = None
    return found


def _cache(x: torch.Tensor, heads: int) -> Cache:
    tokens, sequences, groups, width = x.shape
    return Cache(x.data_ptr(), *x.stride()[:3], tokens, sequences, groups, heads // groups, width)
