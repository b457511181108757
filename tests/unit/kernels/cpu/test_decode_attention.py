"""Attention of one query to a cache, as it lies: as exact as float32, whatever is beside a sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_fp8.kernels.cpu import decode_attention, emulation


@pytest.fixture(autouse=True)
def here():
    if emulation.reason() is not None:
        pytest.skip(emulation.reason())


def inputs(
    tokens: int, heads: int, groups: int, d: int, dv: int, dtype: torch.dtype, sequences: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """q, and what a cache with room for more holds of keys and values."""
    generator = torch.Generator().manual_seed(tokens + d)
    q = torch.randn(sequences, heads, d, generator=generator)
    k = torch.randn(tokens + 5, sequences, groups, d, generator=generator)
    v = torch.randn(tokens + 5, sequences, groups, dv, generator=generator)
    return q.to(dtype), k.to(dtype)[:tokens], v.to(dtype)[:tokens]


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    keys, values = (x.double().repeat_interleave(q.shape[1] // x.shape[2], 2) for x in (k, v))
    weights = (torch.einsum("bhd,tbhd->bht", q.double(), keys) * scale).softmax(-1)
    return torch.einsum("bht,tbhd->bhd", weights, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "groups", "d", "dv"),
    [(2, 8, 2, 128, 128), (33, 6, 2, 64, 48), (70, 5, 1, 17, 33), (257, 4, 4, 15, 7), (1, 12, 2, 130, 1)],
)
def test_as_exact_as_float32(tokens, heads, groups, d, dv, dtype):
    q, k, v = inputs(tokens, heads, groups, d, dv, dtype)
    found, exact = decode_attention.attend(q, k, v, 0.2), reference(q, k, v, 0.2)
    assert found.dtype == dtype and found.shape == exact.shape
    torch.testing.assert_close(
        found, exact.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )


def test_takes_what_lies_so():
    q, k, v = inputs(70, 4, 2, 64, 64, torch.bfloat16)
    assert decode_attention.takes(q, k, v)
    beyond = {
        "strides": (q, k.transpose(2, 3).contiguous().transpose(2, 3), v),
        "dtypes": (q, k.float(), v),
        "dtype": (q.half(), k.half(), v.half()),
        "small": (q, k[:1, :1, :1], v[:1, :1, :1]),
        "negated": (q, k, torch._neg_view(v)),
        "no memory": (q, k.to("meta"), v),
    }
    assert [what for what, given in beyond.items() if decode_attention.takes(*given)] == []


@pytest.mark.parametrize("threads", [1, 2])
def test_alone_and_among_others(threads):
    """The bytes of a sequence do not depend on what is beside it."""
    q, k, v = inputs(900, 8, 2, 64, 64, torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = decode_attention.attend(q, k, v, 0.1)
    finally:
        torch.set_num_threads(before)
    for i in range(len(q)):
        alone = decode_attention.attend(q[i : i + 1], k[:, i : i + 1], v[:, i : i + 1], 0.1)
        assert torch.equal(together[i], alone[0])


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_special_numbers(special):
    """As torch has them: a key's in all that looks at it, a value's in its own column."""
    for of_keys in (True, False):
        q, k, v = inputs(40, 4, 2, 32, 32, torch.float32)
        (k if of_keys else v)[7, 1, 0, 3] = special
        found, exact = decode_attention.attend(q, k, v, 0.1), reference(q, k, v, 0.1)
        torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5, equal_nan=True)
        assert not exact[1, :2].isfinite().all() or (of_keys and special != torch.nan)


def test_no_mode_flushes_subnormal_numbers():
    q, k, v = inputs(70, 4, 2, 64, 64, torch.float32)
    v = v * 2.0**-135
    exact = decode_attention.attend(q, k, v, 0.1)
    torch.set_flush_denormal(True)
    try:
        found = decode_attention.attend(q, k, v, 0.1)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, exact) and bool((exact != 0).any())
