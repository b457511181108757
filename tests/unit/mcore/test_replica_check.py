"""Digests and who differs; on ranks: tests/functional/test_damaged_memory.py, and test_resume.py, whose saves ask."""

from __future__ import annotations

import pytest
import torch

from megatron_fp8.mcore import replica_check
from megatron_fp8.mcore.replica_check import digest


def bits(dtype: torch.dtype, count: int, offset: int = 0) -> torch.Tensor:
    """A tensor of random bits that begins `offset` elements after the start of its memory."""
    drawn = torch.randint(0, 256, ((count + offset) * dtype.itemsize,), dtype=torch.uint8)
    return drawn.view(dtype)[offset:]


@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        (torch.float32, 32771),
        (torch.bfloat16, 7),
        (torch.uint8, 1),
        (torch.float8_e4m3fn, 32771),
        (torch.int64, 32768),
    ],
)
def test_any_flipped_bit_changes_it(dtype: torch.dtype, count: int) -> None:
    tensor = bits(dtype, count)
    before, flat = int(digest(tensor)), tensor.view(torch.uint8)
    for place in torch.randint(0, len(flat), (8,)).tolist():
        for bit in range(8):
            flat[place] ^= 1 << bit
            assert int(digest(tensor)) != before
            flat[place] ^= 1 << bit
    assert int(digest(tensor)) == before


def test_it_is_of_the_values_and_not_of_where_they_lie() -> None:
    for offset in (1, 3, 4):
        tensor = bits(torch.bfloat16, 5000, offset)
        assert int(digest(tensor)) == int(digest(tensor.clone())) == int(digest(tensor.view(50, 100)))
    turned = torch.randn(30, 20).t()
    assert int(digest(turned)) == int(digest(turned.contiguous()))
    assert (
        int(digest(torch.tensor(3.0))) == int(digest(torch.tensor([3.0])))
        and int(digest(torch.empty(0))) == 0
    )


def test_rows_that_change_places_change_it() -> None:
    tensor = torch.randn(4, 8192)
    assert int(digest(tensor)) != int(digest(tensor.flip(0)))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([5, 6], "differs between ranks 0, 2"),
        ([5, 5, 6, 6], "differs between ranks 0, 2, 4, 6"),
        ([5, 6, 5], "is another one on rank 2 than on ranks 0, 4"),
        ([6, 5, 7, 5, 5], "is another one on ranks 0, 4 than on ranks 2, 6, 8"),
        ([5, *[6] * 12], "is another one on rank 0 than on ranks 2, 4, 6, 8, 10, 12, 14, 16 and 4 more"),
    ],
)
def test_the_fewest_are_named(numbers: list[int], words: str) -> None:
    assert replica_check._odd_ones(numbers, list(range(0, 2 * len(numbers), 2))) == words
