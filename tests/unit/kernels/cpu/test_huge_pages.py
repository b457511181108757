"""Huge pages are asked for, and nothing but where memory lies changes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.kernels.cpu import huge_pages
from megatron_fp8.nn import convert_to_fp8


def test_numbers_stay_and_whole_pages_are_told():
    size = huge_pages.page_size() or 2**21
    x = torch.arange(size, dtype=torch.int32)  # four pages
    before = x.clone()
    told = huge_pages.in_huge_pages(x)
    assert_same_bytes(x, before)
    assert told % size == 0 and told <= x.numel() * 4
    assert huge_pages.in_huge_pages(x[: size // 8]) == 0, "less than a page"
    assert huge_pages.in_huge_pages(torch.empty(3, device="meta")) == 0


def test_systems_without_them_are_left_alone(monkeypatch, tmp_path):
    huge_pages.page_size.cache_clear()
    monkeypatch.setattr(huge_pages, "_SIZE", tmp_path / "none")
    assert huge_pages.page_size() == 0 == huge_pages.in_huge_pages(torch.zeros(2**23, dtype=torch.uint8))
    huge_pages.page_size.cache_clear()


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_weights_for_inference_are_asked_for(recipe, monkeypatch):
    asked = []
    monkeypatch.setattr("megatron_fp8.inference.weights.in_huge_pages", lambda x: asked.append(x.shape))
    prepare_for_inference(convert_to_fp8(torch.nn.Linear(64, 96), recipe))
    assert asked == [(96, 64)]
