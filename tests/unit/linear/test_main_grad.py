"""The mark that says that a gradient buffer is zeros, so that a GEMM may overwrite it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fp8.linear.gemm_site import is_zeros, mark_zeros, unmark_zeros


@pytest.fixture
def weight() -> Any:
    weight: Any = torch.nn.Parameter(torch.zeros(4, 8))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(4, 8), False
    mark_zeros([weight, torch.nn.Parameter(torch.zeros(2))])  # one without a buffer is left alone
    return weight


def test_the_mark_is_of_the_buffer_that_was_zeroed(weight: Any) -> None:
    assert is_zeros(weight, captured=False)
    weight.main_grad = torch.ones(4, 8)
    assert not is_zeros(weight, captured=False)


def test_a_fused_gemm_that_has_contributed_ends_it(weight: Any) -> None:
    """Megatron-Core's own linears and Transformer Engine's set the flag, and know no mark."""
    weight.grad_added_to_main_grad = True
    assert not is_zeros(weight, captured=False)


def test_it_can_be_removed(weight: Any) -> None:
    unmark_zeros([weight])
    assert not is_zeros(weight, captured=False)


def test_a_capture_does_not_overwrite_what_eager_code_zeroed(weight: Any) -> None:
    """A replay would overwrite the gradients of earlier replays. Nor does eager code overwrite after a capture."""
    assert not is_zeros(weight, captured=True)
    mark_zeros([weight], captured=True)
    assert is_zeros(weight, captured=True) and not is_zeros(weight, captured=False)
