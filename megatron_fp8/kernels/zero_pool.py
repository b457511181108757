"""Zeros for amaxes: pairs of a block that one launch fills.

A cast that needs an amax first updates it by maximum, so it starts at 0. A fill for each cast would be a third of its
launches. A pair is handed out once, on the stream that filled its block.
"""

from __future__ import annotations

import torch

_PAIRS = 1024
_pools: dict[tuple[torch.device, int], list[torch.Tensor]] = {}


def take(device: torch.device) -> torch.Tensor:
    """float32 [2], zeros that no one else has."""
    if _fills_each(device):
        return torch.zeros(2, dtype=torch.float32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    pool = _pools.setdefault((device, stream), [])
    try:
        return pool.pop()  # one step for threads
    except IndexError:
        with torch.inference_mode(False):
            first, *others = torch.zeros(_PAIRS, 2, dtype=torch.float32, device=device).unbind()
        pool += others
        return first


def _fills_each(device: torch.device) -> bool:
    """In a CUDA graph, which fills at each replay, and under a dispatch mode, whose tensors may be fake."""
    captures = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return captures or torch._C._len_torch_dispatch_stack() > 0
