"""Which scales are kept beside a decoded weight: those from which its codes follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_fp8.huggingface.architectures import Entry
from megatron_fp8.huggingface.block_scales import block_scales
from megatron_fp8.huggingface.directory import Tensors
from megatron_fp8.huggingface.weight_decoder import decode
from megatron_fp8.params.block_codes import codes_of

ENTRY = Entry("ours.weight", ("theirs.weight",), ("hidden", "hidden"), site="ours")
SMALLEST = 2.0**-117
ALL = torch.arange(256, dtype=torch.uint8)
FINITE = ALL[ALL % 128 != 127].view(torch.float8_e4m3fn)


def kept(folder: Any, scale: torch.Tensor) -> torch.Tensor | None:
    codes = torch.zeros(128 * len(scale), 128).to(torch.float8_e4m3fn)
    save_file({"theirs.weight": codes, "theirs.weight_scale_inv": scale}, folder / "model.safetensors")
    with Tensors(folder) as tensors:
        return block_scales(ENTRY, tensors, {})[0]


def follows(scale: float) -> bool:
    """Whether every code follows from its product with a scale."""
    one = torch.full([1, 1], scale)
    codes = FINITE.reshape(1, -1).expand(128, -1)[:, :128].contiguous(), FINITE[-128:].reshape(1, -1)
    return all(
        torch.equal(codes_of(decode("w", each, one), one).view(torch.uint8), each.view(torch.uint8))
        for each in codes
    )


def test_scales_are_kept_down_to_where_products_are_no_longer_normal(tmp_path):
    scale = torch.tensor([[SMALLEST], [3.7], [1e30]])
    found = kept(tmp_path, scale)
    assert found is not None and torch.equal(found, scale)
    for bad in (SMALLEST * (1 - 2**-23), 0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"theirs.weight is damaged: a scale of it is .*at least 6e-36"):
            kept(tmp_path, torch.tensor([[1.0], [bad]]))
    assert kept(tmp_path, torch.ones(1, 1).bfloat16()) is None


def test_codes_follow_from_every_scale_that_is_kept():
    generator = torch.Generator().manual_seed(3)
    mantissas = 1 + torch.rand(300, generator=generator)
    assert all(follows(SMALLEST * mantissa) for mantissa in mantissas.tolist())
    with pytest.raises(ValueError, match="a scale of it is"):
        follows(2.0**-146 * 1.3)  # products of few bits
