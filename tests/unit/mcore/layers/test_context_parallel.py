"""Attention split over context-parallel ranks: numbers against float64 and one rank, messages, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.support.gpt import gpt_config, train
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.mcore.layers import context_parallel
from megatron_fp8.mcore.layers.attention import CoreAttention
from tests.support.attention import SIZE, build, errors, forward_backward, inputs, reference

BF16 = {"bf16": True, "params_dtype": torch.bfloat16}


def mine(whole: Tensor, name: str = "x") -> Tensor:
    """This rank's part of [s, b, ...] by Megatron-Core's own cutting; of a mask [b, 1, s, s] as 'attention_mask'."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    if name == "attention_mask":
        return get_batch_on_this_cp_rank({name: whole.contiguous()})[name]
    return get_batch_on_this_cp_rank({name: whole.transpose(0, 1).contiguous()})[name].transpose(0, 1)


def window_mask(length: int, before: int, after: int) -> Tensor:
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    return ((distance > before) | (distance < -after))[None, None]


FLASH, UNFUSED = {"attention_backend": "flash"}, {"attention_backend": "unfused"}
CASES: dict[str, tuple[int, tuple[Any, ...], dict[str, Any]]] = {
    # Name -> ranks, (cp_comm_type, groups, causal or the type of a given mask), fields
    "default": (2, (None, 4, True), {}),
    "default, three ranks": (3, (None, 2, True), {}),
    "default, no mask": (2, (None, 2, False), {}),
    "gather, window": (2, ("all_gather", 2, True), {"window_size": (7, 0)}),
    "gather, window, flash": (2, ("all_gather", 2, True), {"window_size": (7, 0), **FLASH}),
    "gather, mask": (2, ("all_gather", 4, "arbitrary"), {}),
    "gather, unfused": (3, ("all_gather", 2, True), UNFUSED),
    "ring": (2, ("p2p", 4, True), {}),
    "ring, flash": (3, ("p2p", 2, True), FLASH),
    "ring, unfused": (3, ("p2p", 2, True), UNFUSED),
    "ring, no mask": (3, ("p2p", 2, False), {}),
    "ring, window": (3, ("p2p", 2, True), {"window_size": (7, 0)}),
    "ring, window after queries": (2, ("p2p", 2, True), {"window_size": (2, 4)}),
    "ring, mask": (3, ("p2p", 2, "arbitrary"), {}),
    "ring, wide values": (3, ("p2p", 4, True), {"values": 24}),
    "heads": (2, ("a2a", 2, True), {}),
    "heads, mask": (2, ("a2a", 4, "padding"), {}),
    "heads, window": (2, ("a2a", 2, True), {"window_size": (7, 0)}),
    "heads, wide values": (2, ("a2a", 4, False), {"values": 24}),
}


def split(
    layout: Layout,
    kind: str | None,
    groups: int,
    causal: bool | str,
    dtype: torch.dtype,
    values: int = SIZE,
    **fields: Any,
) -> list[tuple[float, float]]:
    """Errors against float64 of this rank's output, dq, dk, dv: computed over all ranks, and by one rank."""
    from megatron.core.transformer.enums import AttnBackend

    length = 12 * layout.cp
    data = inputs(length, groups, dtype, values)
    hidden = mask = rows = None
    if isinstance(causal, str):
        hidden = mask = torch.rand(2, 1, length, length, generator=torch.Generator().manual_seed(1)) < 0.6
        mask[1, :, :, : length // 2] = True  # no query of this sequence sees these keys, as padding
        mask[0, :, 5] |= dtype == torch.bfloat16  # sees no key; near -10000 float32 has steps of 1/1024
        rows = mine(mask, "attention_mask")
    if fields.get("window_size"):
        hidden = window_mask(length, *fields["window_size"])
    masked = causal is True and hidden is None  # a window is in place of the causal mask
    exact = [x.double() for x in data]
    want = forward_backward(lambda q, k, v: reference(q, k, v, SIZE**-0.5, masked, hidden), *exact)

    backend = fields.pop("attention_backend", "auto")
    fields |= {"values": values, **(BF16 if dtype == torch.bfloat16 else {})}
    # SDPA has no kernel for wide values on CPUs: it computes in float32, which is no baseline for BF16.
    names = (backend if values == SIZE else "unfused", backend)
    alone, module = (
        build(CoreAttention, groups, on, causal, attention_backend=AttnBackend[name], **fields, **kinds)
        for on, name, kinds in zip((Layout(), layout), names, ({}, {"cp_comm_type": kind}), strict=True)
    )
    got = forward_backward(lambda *x: module(*x, rows), *map(mine, data))
    base = forward_backward(lambda *x: alone(*x, mask), *data)
    parts = [mine(w) for w in want]
    return list(zip(errors(got, parts), errors([mine(x) for x in base], parts), strict=True))


def all_splits(dtype: torch.dtype) -> dict[str, list[tuple[float, float]]]:
    size = dist.get_world_size()
    with model_parallel(Layout(cp=size)) as layout:
        return {
            name: split(layout, *arguments, dtype, **fields)
            for name, (world, arguments, fields) in CASES.items()
            if world == size
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("world", [2, 3])
def test_parts_are_parts_of_the_whole(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    for rank, found in enumerate(ranks(world).run(all_splits, dtype)):
        assert len(found) == sum(case[0] == world for case in CASES.values())
        for name, each in found.items():
            for one, baseline in each:
                limit = 1e-6 if dtype == torch.float32 else 1.5 * baseline + 1e-3
                assert one < limit, (rank, name, each)


def softmax_offset() -> tuple[list[float], list[Tensor]]:
    """Options that only Megatron-Core's math has: over ranks, and by one rank."""
    with model_parallel(Layout(cp=2)) as layout:
        data = inputs(24, 2, torch.float32)
        results = []
        for parallel in (layout, Layout()):
            module = build(CoreAttention, 2, parallel, softmax_type="off-by-one")
            part = [mine(x) for x in data] if parallel is layout else data
            results.append(forward_backward(lambda *x, m=module: m(*x, None), *part))
        plain = build(CoreAttention, 2, layout)(*(mine(x) for x in data[:3]), None)
        assert not torch.allclose(results[0][0], plain, atol=1e-3), "the option does something"
        return errors(results[0], [mine(x).double() for x in results[1]])


def test_gathered_keys_have_all_options_of_megatrons_math(ranks: RankPool) -> None:
    for found in ranks(2).run(softmax_offset):
        assert max(found) < 1e-6


def losses(cp: int, fields: dict[str, Any]) -> list[tuple[float, float]]:
    """Losses and gradient norms of a float32 GPT of two layers over two steps."""
    with model_parallel(Layout(cp=cp)) as layout:
        config = gpt_config(layout, bf16=False, params_dtype=torch.float32, **fields)
        run = train(config, steps=2, sequence=32, micro_batch=1, global_batch=2)
    return list(zip(run.losses, run.grad_norms, strict=True))


def test_a_model_trains_as_on_one_rank(ranks: RankPool) -> None:
    want = ranks(1).run(losses, 1, {})[0]
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    for fields in ({"cp_comm_type": "p2p", **recomputed}, {"cp_comm_type": "a2a"}):
        for found in ranks(2).run(losses, 2, fields):
            for one, other in zip(found, want, strict=True):
                assert one == pytest.approx(other, rel=2e-6), (fields, found, want)


# ------------------------------------------------------------------------------------------------------------- messages


def messages(causal: bool) -> tuple[list[str], list[str], list[tuple[int, int, int]]]:
    """What happens in forward, in backward, and (tag, bytes, receiver) of each message sent."""
    size, events, sent = dist.get_world_size(), [], []

    def record(name: str, original: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return original(*args, **kwargs)

        return called

    batch = dist.batch_isend_irecv

    def batched(ops: list[Any]) -> Any:
        for op in ops:
            if op.op is dist.isend:
                sent.append((op.tag, op.tensor.nbytes, op.peer))
        return batch(ops)

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a ring has no collective")

    with model_parallel(Layout(cp=size)) as layout, pytest.MonkeyPatch.context() as patch:
        module = build(CoreAttention, 2, layout, causal, cp_comm_type="p2p", **BF16)
        kernel, message = context_parallel.block_kernel, context_parallel._Message

        def recorded_kernel(*args: Any) -> Any:
            return type(kernel(*args))(*(record("multiply", f) for f in kernel(*args)))

        patch.setattr(context_parallel, "block_kernel", recorded_kernel)
        patch.setattr(message, "__init__", record("send", message.__init__))
        patch.setattr(message, "wait", record("wait", message.wait))
        patch.setattr(dist, "batch_isend_irecv", batched)
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
            patch.setattr(dist, name, refused)
        q, k, v, grad = (mine(x) for x in inputs(12 * size, 2, torch.bfloat16))
        out = module(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), None)
        forward, events[:] = list(events), []
        out.backward(grad)
        return forward, events, sent


@pytest.mark.parametrize(("world", "causal"), [(2, True), (3, False)])
def test_messages_of_a_ring_travel_while_blocks_are_multiplied(
    ranks: RankPool, world: int, causal: bool
) -> None:
    values = 2 * 12 * 2 * 2 * SIZE  # keys and values: tokens of a rank, batch, groups, channels
    for rank, (forward, backward, sent) in enumerate(ranks(world).run(messages, causal)):
        assert forward == ["send", "multiply", "wait"] * (world - 1) + ["multiply"]
        first, between, last = (
            ["send", "multiply", "send", "wait"],
            ["send", "multiply", "wait", "send", "wait"],
            ["multiply", "wait", "send", "wait"],
        )
        assert backward == first + between * (world - 2) + last
        after = (rank + 1) % world
        keys, sums = (0, 2 * values, after), (1, 4 * values, after)
        assert sorted(sent) == [keys] * 2 * (world - 1) + [sums] * world


# -------------------------------------------------------------------------------------------------------------- kernels


def test_kernels_of_a_gpu_take_what_a_ring_gives() -> None:
    """torch's operators for CUDA, by their own schemas and shape rules, without a device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megatron_fp8.mcore.layers.attention_kernels import CUDNN, FLASH

    with FakeTensorMode():
        shapes = [(2, 4, 8, 16), (2, 2, 12, 16), (2, 2, 12, 16)]
        q, k, v = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        for kernel in (FLASH, CUDNN):
            out, lse, rest = kernel.forward(q, k, v, False, None, 0.25)
            assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
            grads = kernel.backward(out, q, k, v, out, lse, rest, False, None, 0.25)
            assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


# -------------------------------------------------------------------------------------------------------------- refusals

FLASH_RING = {"cp_comm_type": "p2p", "attention_backend": "flash"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"attention_dropout": 0.1}, "attention_dropout cannot be combined with context_parallel_size=2"),
    ({"cp_comm_type": "p2p", "softmax_type": "off-by-one"}, "softmax_type='off-by-one'"),
    ({"cp_comm_type": "a2a", "softmax_type": "off-by-one"}, "softmax_type='off-by-one'"),
    ({"cp_comm_type": "a2a+p2p"}, "'a2a+p2p' must be one of 'all_gather', 'p2p', 'a2a'"),
    ({"cp_comm_type": ["p2p", "a2a"]}, "must be one of"),
    ({"cp_comm_type": "a2a", "groups": 1}, "1 groups of keys"),
    ({**FLASH_RING, "window_size": (4, 0)}, "no masks or windows in a ring"),
    ({**FLASH_RING, "causal": "arbitrary"}, "no masks or windows in a ring"),
]


def refusals() -> list[str]:
    from megatron.core.transformer.enums import AttnBackend

    said = []
    with model_parallel(Layout(cp=2)) as layout:
        for fields, _ in REFUSED:
            fields = {"groups": 2, **fields}
            if "attention_backend" in fields:
                fields["attention_backend"] = AttnBackend[fields["attention_backend"]]
            with pytest.raises(ValueError) as caught:
                build(CoreAttention, layout=layout, **fields)
            said.append(str(caught.value))
        config = gpt_config(layout, cp_comm_type=["p2p", "p2p"])
        with pytest.raises(
            ValueError, match="for all layers"
        ):  # not an IndexError of Megatron-Core's last layer
            train(config, steps=1)
        q, k, v, _ = inputs(8, 2, torch.float32)
        module = build(CoreAttention, 2, layout, "arbitrary", cp_comm_type="p2p")
        with pytest.raises(ValueError, match="even number; got 7 and 7"):
            module(q[:7], k[:7], v[:7], None)
        with pytest.raises(ValueError, match="needs attention_mask"):
            module(q, k, v, None)
        with pytest.raises(ValueError, match="8 queries and 16 keys"):
            module(q, k, v, torch.zeros(1, 1, 8, 8, dtype=torch.bool))
        with pytest.raises(ValueError, match="neither an attention bias"):
            module(q, k, v, None, attention_bias=q)
        named = build(
            CoreAttention, 2, layout, False, cp_comm_type="p2p", attention_backend=AttnBackend.flash
        )
        with pytest.raises(ValueError, match="'flash' takes no mask in a ring"):
            named(q, k, v, torch.zeros(1, 1, 8, 16, dtype=torch.bool))
    return said


def test_what_context_parallelism_cannot_do_is_refused(ranks: RankPool) -> None:
    said = ranks(2).run(refusals)[0]
    assert len(said) == len(REFUSED)
    for message, (_, reason) in zip(said, REFUSED, strict=True):
        assert reason in message and "cp_comm_type" in message
