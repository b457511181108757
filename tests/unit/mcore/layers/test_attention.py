"""Core attention: against float64, against Megatron-Core's own, and split over context-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.support.gpt import gpt_config
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.mcore.layers.attention import CoreAttention
from megatron_fp8.numerics import host_sync

HEADS, SIZE = 4, 16


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """softmax(q k^T * scale) v written out, [s, b, heads, d] -> [s, b, heads * d]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(len(q), len(k)).triu(1).bool(), float("-inf"))
    return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), v).flatten(2)


def inputs(sequence: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the output's gradient for the whole sequence, batch 2."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(HEADS, SIZE), (groups, SIZE), (groups, SIZE)]
    qkv = [torch.randn(sequence, 2, *shape, generator=generator).to(dtype) for shape in shapes]
    return [*qkv, torch.randn(sequence, 2, HEADS * SIZE, generator=generator).to(dtype)]


def forward_backward(attend: Any, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def build(
    cls: Any, groups: int, layout: Layout, causal: bool = True, scale: float | None = None, **fields: Any
) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    config = gpt_config(
        layout,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        hidden_size=HEADS * SIZE,
        **{"bf16": False, "params_dtype": torch.float32, **fields},
    )
    mask = AttnMaskType.causal if causal else AttnMaskType.no_mask
    return cls(config, 1, mask, "self", softmax_scale=scale)


def errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True)]


def one_rank(
    dtype: torch.dtype, groups: int, causal: bool, scale: float | None
) -> tuple[list[float], list[float]]:
    """Errors against float64 of output, dq, dk, dv: of Megatron-Core's class and of ours."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    with model_parallel() as layout:
        data = inputs(33, groups, dtype)
        want = forward_backward(
            lambda q, k, v: reference(q, k, v, scale or SIZE**-0.5, causal), *(x.double() for x in data)
        )
        mask = None if causal else torch.zeros(1, 1, 33, 33, dtype=torch.bool)
        found = []
        for cls, given in ((DotProductAttention, mask), (CoreAttention, None)):
            module = build(cls, groups, layout, causal, scale)
            found.append(errors(forward_backward(lambda *x, m=module, g=given: m(*x, g), *data), want))
        return found[0], found[1]


@pytest.mark.parametrize(
    ("dtype", "groups", "causal", "scale"),
    [(torch.float32, 4, True, None), (torch.bfloat16, 2, True, 0.5), (torch.float32, 1, False, None)],
)
def test_as_exact_as_megatrons(
    ranks: RankPool, dtype: torch.dtype, groups: int, causal: bool, scale: float | None
) -> None:
    megatrons, ours = ranks(1).run(one_rank, dtype, groups, causal, scale)[0]
    for theirs, mine in zip(megatrons, ours, strict=True):
        assert mine < max(1.5 * theirs, 1e-6)
        assert mine < (1e-6 if dtype == torch.float32 else 1e-2)


def other_options(fields: dict[str, Any]) -> bool:
    """Whether our class answers with Megatron-Core's own bits for options that only that one has."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    results = []
    with model_parallel() as layout:
        data = inputs(16, 2, torch.float32)
        state = torch.get_rng_state()
        for cls in (DotProductAttention, CoreAttention):
            torch.set_rng_state(state)
            module = build(cls, 2, layout, **fields)
            from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

            model_parallel_cuda_manual_seed(5, force_reset_rng=True)
            results.append(forward_backward(lambda *x, m=module: m(*x, None), *data))
        plain = forward_backward(lambda *x: build(CoreAttention, 2, layout)(*x, None), *data)
    assert not torch.allclose(results[0][0], plain[0], atol=1e-4), "the option does something"
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    "fields",
    [{"attention_dropout": 0.2}, {"window_size": (4, 0)}, {"softmax_type": "off-by-one"}],
    ids=lambda fields: next(iter(fields)),
)
def test_other_options_are_megatrons_own(ranks: RankPool, fields: dict[str, Any]) -> None:
    assert ranks(1).run(other_options, fields) == [True]


def saved_bytes() -> int:
    with model_parallel() as layout:
        module = build(CoreAttention, 2, layout)
        q, k, v, _ = (x.requires_grad_() for x in inputs(256, 2, torch.bfloat16))
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            module(q, k, v, None)
        return sum(storages.values())


def test_no_score_matrix_and_no_repeated_heads_are_saved(ranks: RankPool) -> None:
    rows, bf16 = 256 * 2, 2
    q = out = rows * HEADS * SIZE * bf16
    kv = 2 * rows * 2 * SIZE * bf16
    logsumexp = rows * HEADS * 4
    assert ranks(1).run(saved_bytes)[0] <= q + out + kv + logsumexp + 1024


def split(groups: int, causal: bool, dtype: torch.dtype) -> list[float]:
    """Errors of this rank's part of output, dq, dk, dv against float64 on the whole sequence."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    size = dist.get_world_size()
    with model_parallel(Layout(cp=size)) as layout:
        data = inputs(12 * size, groups, dtype)
        want = forward_backward(
            lambda q, k, v: reference(q, k, v, SIZE**-0.5, causal), *(x.double() for x in data)
        )

        def mine(whole: Tensor) -> Tensor:
            """This rank's part by Megatron-Core's own cutting, which takes [batch, sequence, ...]."""
            return get_batch_on_this_cp_rank({"x": whole.transpose(0, 1).contiguous()})["x"].transpose(0, 1)

        module = build(CoreAttention, groups, layout, causal)
        got = forward_backward(lambda *x: module(*x, None), *map(mine, data))
        return errors(got, [mine(w) for w in want])


@pytest.mark.parametrize(("world", "groups", "causal"), [(2, 4, True), (3, 2, True), (2, 2, False)])
def test_context_parallel_parts_are_parts_of_the_whole(
    ranks: RankPool, world: int, groups: int, causal: bool
) -> None:
    for found in ranks(world).run(split, groups, causal, torch.float32):
        assert max(found) < 1e-6


def test_context_parallel_bf16(ranks: RankPool) -> None:
    for found in ranks(2).run(split, 2, True, torch.bfloat16):
        assert max(found) < 1e-2


def refusals() -> list[str]:
    messages = []
    with model_parallel(Layout(cp=2)) as layout:
        for fields in ({"attention_dropout": 0.1}, {"window_size": (4, 0)}, {"softmax_type": "off-by-one"}):
            with pytest.raises(ValueError) as caught:
                build(CoreAttention, 2, layout, **fields)
            messages.append(str(caught.value))
        q, k, v, _ = inputs(7, 2, torch.float32)
        with pytest.raises(ValueError, match="even number; got 7 and 7"):
            build(CoreAttention, 2, layout)(q, k, v, None)
        with pytest.raises(ValueError, match="without a given mask"):
            build(CoreAttention, 2, layout, causal=False)(q, k, v, torch.zeros(1, 1, 7, 7, dtype=torch.bool))
    return messages


def test_what_context_parallelism_cannot_do_is_refused(ranks: RankPool) -> None:
    for message, name in zip(
        ranks(2).run(refusals)[0],
        ("attention_dropout", "window_size", "softmax_type='off-by-one'"),
        strict=True,
    ):
        assert message.startswith(name) and "context_parallel_size=2" in message


def packed_sequences() -> None:
    """Three sequences in one row, padded or not, are the three by themselves, gradients too."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    with model_parallel():
        attention = CoreAttention(gpt_config(), 1, AttnMaskType.causal, "self")
        ends, rooms = torch.tensor([0, 5, 6, 16]), torch.tensor([0, 8, 9, 19])
        for padded, total in ((None, 16), (rooms, 20)):
            starts = (ends if padded is None else padded).tolist()
            q, k, v = (torch.randn(total, heads, 64, requires_grad=True) for heads in (4, 2, 2))
            packed = PackedSeqParams("thd", ends, ends, padded, padded, 10, 10)
            context = attention(q, k, v, None, packed_seq_params=packed)
            alone = torch.zeros_like(context)
            for start, length in zip(starts, ends.diff().tolist(), strict=False):
                one = (x[start : start + length].unsqueeze(1) for x in (q, k, v))
                alone[start : start + length] = attention(*one, None).squeeze(1)
            assert torch.equal(context, alone)
            weight = torch.randn_like(context)
            grads = [torch.autograd.grad((y * weight).sum(), (q, k, v)) for y in (context, alone)]
            assert all(map(torch.equal, *grads))


def test_packed_sequences_attend_each_to_itself(ranks: RankPool) -> None:
    ranks(1).run(packed_sequences)


@pytest.mark.parametrize("groups", [4, 2])
def test_last_queries_on_a_gpu(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU is told: the same attention, by no mask in memory, and never by cuDNN, whose gradients may be NaN."""
    from torch.nn.attention.bias import CausalBias

    from megatron_fp8.mcore.layers import attention

    q, k, v, _ = inputs(24, groups, torch.float32)
    written = attention._sdpa(q[16:], k, v, 0.25, **attention._causal_mask(q[16:], k, True))
    asked: list[bool] = []
    dispatch = CausalBias._dispatch

    def asking(*args: Any, **kwargs: Any) -> Tensor:
        asked.append(torch.backends.cuda.cudnn_sdp_enabled())
        return dispatch(*args, **kwargs)

    monkeypatch.setattr(host_sync, "reading_syncs", lambda device: True)
    monkeypatch.setattr(CausalBias, "_dispatch", staticmethod(asking))
    mask = attention._causal_mask(q[16:], k, True)
    told = attention._sdpa(q[16:], k, v, 0.25, **mask)
    assert mask["attn_mask"].untyped_storage().nbytes() == 0 and asked == [False]
    torch.testing.assert_close(told, written)
    assert attention._causal_mask(q, k, True) == {"is_causal": True}, (
        "where there is no mask cuDNN is left alone"
    )
