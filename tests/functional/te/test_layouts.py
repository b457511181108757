"""The conformance kit's adapter of Transformer Engine: layouts of its real buffers are undone.

The casts are this package's, written where a kernel of Transformer Engine would write them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from megatron_fp8.conformance import differences, load
from megatron_fp8.conformance.adapters import of_megatron_fp8, of_transformer_engine
from megatron_fp8.numerics.nvfp4 import hadamard

CASES = [
    case
    for case in load()
    if case.name.endswith(", normal") and case.block and case.block != (1, 0) and case.random_bytes is None
]


def written(case: Any, x: torch.Tensor, quantizer: te.Quantizer) -> Any:
    """The tensor that a quantizer allocates for x [rows, cols], with the case's codes and scales in its buffers."""
    buffers = quantizer.alloc_tensors(x.shape, device="cpu")
    for buffer in buffers.values():
        buffer.view(torch.uint8).fill_(0xFF)  # NaN, where it is padding
    side = "columnwise" if quantizer.columnwise_usage else "rowwise"
    x = x.t() if side == "columnwise" else x
    shape = case.expected["scale_inv"].shape
    whole = (len(x), shape[1]) if case.scale == "e8m0" else shape
    asked = dataclasses.replace(case, x=x, expected={"scale_inv": torch.empty(whole)})
    for name, found in of_megatron_fp8(asked).items():
        if case.block == (0, 0):
            buffer = buffers[{"codes": "_data", "scale_inv": "_scale_inv"}[name]]
        else:
            names = {"codes": "_{}_data", "scale_inv": "_{}_scale_inv", "amax": "_amax_{}"}
            buffer = buffers[names[name].format(side)]
        if name == "scale_inv" and case.block == (1, 128):
            found = found.t()
        found = found.reshape(found.shape if buffer.dim() == 2 else -1).view(buffer.dtype)
        buffer[tuple(slice(size) for size in found.shape)] = found
    made = quantizer.create_metadata(x.shape, dtype=x.dtype)
    return made["cls"].__tensor_unflatten__(buffers, made, x.shape, x.stride())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_transformer_engines_layouts_are_undone(case, monkeypatch, extension):
    monkeypatch.setattr(extension, "quantize", lambda x, quantizer, *_: written(case, x, quantizer))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    assert differences(case, of_transformer_engine(case)) == []


def test_the_transform_is_ours():
    """Signs and matrix, to the bit."""
    quantizer = te.NVFP4Quantizer(te.DType.kFloat4E2M1, with_rht=True, with_post_rht_amax=True)
    assert torch.equal(quantizer.rht_matrix, hadamard(torch.eye(16)))
