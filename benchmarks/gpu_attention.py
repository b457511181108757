"""Checks of gpu_check.py of attention's kernels by blocks, as in a ring (``--only attention``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from benchmarks.gpu_common import Machine, NotRun, relative_error
from benchmarks.gpu_kernels import random
from megatron_fp8.mcore.layers.attention_kernels import (
    CPU_FLASH,
    CUDNN,
    FLASH,
    MATH,
    SDPA_KERNELS,
    BlockKernel,
    check_backend,
)
from megatron_fp8.mcore.layers.context_parallel import merge

KERNELS = {"flash": (FLASH, "flash"), "cudnn": (CUDNN, "fused")}
DRY = {"flash": CPU_FLASH, "cudnn": MATH}
HEADS, GROUPS, SCALE = 8, 2, 0.125


def checks() -> dict[str, Callable[[Machine], str]]:
    """Every check by name."""
    return {f"attention {name}": partial(attention, name=name) for name in KERNELS}


def attention(machine: Machine, name: str) -> str:
    """Causal attention in three blocks, merged: as near to float64 as the kernel in one call, gradients too."""
    kernel, backend = KERNELS[name]
    length, width = (64, 16) if machine.dry else (2048, 128)
    if machine.dry:
        kernel, backend = DRY[name], "flash"
    try:
        check_backend(backend, torch.bfloat16, HEADS, GROUPS, (width, width))
    except ValueError as error:
        raise NotRun(str(error)) from None
    q, grad = (random(machine, 2, HEADS, length, width, seed=seed) for seed in (1, 2))
    k, v = (random(machine, 2, GROUPS, length, width, seed=seed) for seed in (3, 4))

    exact = [x.double() for x in (grad, q, k, v)]
    out, lse, rest = MATH.forward(*exact[1:], True, None, SCALE)
    want = [out, *MATH.backward(*exact, out, lse, rest, True, None, SCALE)]

    lq, lk, lv = (x.detach().requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPA_KERNELS[backend]):
        whole = F.scaled_dot_product_attention(lq, lk, lv, is_causal=True, scale=SCALE, enable_gqa=True)
    one_call = [whole.detach(), *torch.autograd.grad(whole, (lq, lk, lv), grad)]
    alone = [relative_error(x, y) for x, y in zip(one_call, want, strict=True)]
    found = [relative_error(x, y) for x, y in zip(in_blocks(kernel, grad, q, k, v), want, strict=True)]
    text = ", ".join(
        f"{what} {mine:.1e} (one call {theirs:.1e})"
        for what, mine, theirs in zip(("out", "dq", "dk", "dv"), found, alone, strict=True)
    )
    assert all(mine < 1.5 * theirs + 1e-3 for mine, theirs in zip(found, alone, strict=True)), text
    return text


def in_blocks(kernel: BlockKernel, grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Output and gradients of q, k, v from three blocks: both halves to themselves, and the second to the first."""
    first, second = slice(q.shape[2] // 2), slice(q.shape[2] // 2, None)
    blocks = ((first, first, True), (second, second, True), (second, first, False))
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:3], float("-inf"), device=q.device)
    for rows, columns, causal in blocks:
        part, part_lse, rest = kernel.forward(
            q[:, :, rows], k[:, :, columns], v[:, :, columns], causal, None, SCALE
        )
        merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
    result = out.to(q.dtype)
    sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)]
    for rows, columns, causal in blocks:
        parts = kernel.backward(
            grad[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], result[:, :, rows],
            lse[:, :, rows].contiguous(), rest, causal, None, SCALE,
        )  # fmt: skip
        for total, part, where in zip(sums, parts, (rows, columns, columns), strict=True):
            total[:, :, where] += part
    return [result, *sums]
