"""Matrices whose numbers make codes of all kinds."""

from __future__ import annotations

import torch


def matrix(shape: tuple[int, int], dtype: torch.dtype, what: str) -> torch.Tensor:
    """Numbers of many sizes, so that codes of all kinds come out."""
    generator = torch.Generator().manual_seed(shape[0])
    x = torch.randn(shape, generator=generator)
    if what == "wide":
        x *= torch.exp2(torch.randint(-30, 8, shape, generator=generator).float())
    if what == "bits":
        x = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int32).view(torch.float32)
    if what == "special":
        x.view(-1)[5], x.view(-1)[37], x[-1, -1] = torch.nan, -torch.inf, -torch.nan
    if what == "zeros":
        x[:, : shape[1] // 2] = 0
        x[: shape[0] // 2] *= -0.0
    if what == "tiny":
        x *= 2.0**-130
    return x.to(dtype)
