"""Core attention: against float64, against Megatron-Core's own, and split over context-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.support.gpt import gpt_config
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.mcore.layers.attention import CoreAttention
from megatron_fp8.mcore.layers.attention_kernels import chosen_backend
from megatron_fp8.numerics import host_sync
from tests.support.attention import HEADS, SIZE, build, errors, forward_backward, inputs, reference
from tests.support.small_run import small_run


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


def named(
    backend: str, groups: int, causal: bool | str, window: tuple[int, int] | None
) -> tuple[list[float], list[float], set[str]]:
    """Errors against float64 of 'auto' and of a named backend, and the kernels that ran for the latter."""
    from megatron.core.transformer.enums import AttnBackend

    with model_parallel() as layout:
        data = inputs(33, groups, torch.bfloat16)
        mask = None
        if isinstance(causal, str):
            mask = torch.rand(2, 1, 33, 33, generator=torch.Generator().manual_seed(1)) < 0.5
        distance = torch.arange(33).unsqueeze(1) - torch.arange(33)
        hidden = mask if window is None else ((distance > window[0]) | (distance < -window[1]))[None, None]
        exact = [x.double() for x in data]
        want = forward_backward(
            lambda q, k, v: reference(q, k, v, SIZE**-0.5, causal is True and window is None, hidden), *exact
        )
        fields = {"bf16": True, "params_dtype": torch.bfloat16, "window_size": window}
        auto, module = (
            build(CoreAttention, groups, layout, causal, attention_backend=AttnBackend[name], **fields)
            for name in ("auto", backend)
        )
        base = forward_backward(lambda *x: auto(*x, mask), *data)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            got = forward_backward(lambda *x: module(*x, mask), *data)
        ran = {event.key for event in profile.key_averages()}
        return errors(base, want), errors(got, want), {name for name in KERNELS if KERNELS[name] in ran}


KERNELS = {
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "math": "aten::baddbmm",
}


@pytest.mark.parametrize(
    ("backend", "groups", "causal", "window", "ran"),
    [
        ("flash", 4, True, None, {"flash"}),
        ("flash", 2, True, (6, 0), {"flash"}),
        ("flash", 2, "arbitrary", None, {"flash"}),
        ("unfused", 2, True, None, {"math"}),
        ("local", 4, False, None, {"math"}),
    ],
)
def test_a_named_backend_runs_and_no_other(
    ranks: RankPool, backend: str, groups: int, causal: bool | str, window: Any, ran: set[str]
) -> None:
    auto, found, kernels = ranks(1).run(named, backend, groups, causal, window)[0]
    assert kernels == ran
    for mine, baseline in zip(found, auto, strict=True):
        assert mine < 1.5 * baseline + 1e-3 and mine < 2e-2


def dropped() -> tuple[list[dict[str, Any]], list[bool]]:
    """What SDPA is told by a named backend with dropout, training and not, and whether it has the rank's own stream."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.enums import AttnBackend

    from megatron_fp8.mcore.layers import attention

    calls, streams = [], []
    with model_parallel() as layout, pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "check_backend", lambda *args, **options: None)  # CPUs have no such kernel
        model_stream = torch.get_rng_state()

        def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, **options: Any) -> Tensor:
            calls.append(options)
            streams.append(torch.equal(torch.get_rng_state(), model_stream))
            return torch.zeros_like(q)

        patch.setattr(attention, "_sdpa", sdpa)
        assert get_cuda_rng_tracker().is_initialized()
        for training, parallel in ((True, False), (False, False), (True, True)):
            module = build(
                CoreAttention, 2, layout, attention_dropout=0.25, attention_backend=AttnBackend.flash
            )
            module.config.sequence_parallel = parallel
            module.train(training)(*inputs(8, 2, torch.float32)[:3], None)
    return calls, streams


def test_dropout_of_a_named_kernel_has_the_ranks_own_stream(ranks: RankPool) -> None:
    calls, streams = ranks(1).run(dropped)[0]
    assert [call.get("dropout_p") for call in calls] == [0.25, None, 0.25]
    assert streams == [False, True, True], "as Megatron-Core's math draws it"


def named_refusals() -> list[str]:
    """What is said of backends that cannot run here."""
    from megatron.core.transformer.enums import AttnBackend

    messages = []
    with model_parallel() as layout:
        for backend, fields in (
            ("fused", {}),
            ("flash", {"attention_dropout": 0.1}),
            ("flash", {"values": 24}),
            ("flash", {"softmax_type": "off-by-one"}),
        ):
            for value in (backend, AttnBackend[backend]):
                with pytest.raises(ValueError) as caught:
                    build(CoreAttention, 2, layout, attention_backend=value, **fields)
            messages.append(str(caught.value))
        with pytest.raises(ValueError) as caught:
            build(CoreAttention, 2, layout, attention_backend="flsh")
        messages.append(str(caught.value))
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError) as caught:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            chosen_backend(gpt_config(attention_backend=AttnBackend.fused, deterministic_mode=True))
        messages.append(str(caught.value))
    return messages


def test_a_backend_that_cannot_run_is_refused_with_the_reason(ranks: RankPool) -> None:
    reasons = (
        "cannot run on a CPU",
        "dropout",
        "same last dimension",
        "softmax_type='off-by-one'",
        "'flsh' must be one of",
        "not deterministic",
    )
    messages = ranks(1).run(named_refusals)[0]
    assert len(messages) == len(reasons)
    for message, reason in zip(messages, reasons, strict=True):
        assert reason in message and "attention_backend" in message


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

    monkeypatch.setattr(host_sync, "read_waits", lambda device: True)
    monkeypatch.setattr(CausalBias, "_dispatch", staticmethod(asking))
    mask = attention._causal_mask(q[16:], k, True)
    told = attention._sdpa(q[16:], k, v, 0.25, **mask)
    assert mask["attn_mask"].untyped_storage().nbytes() == 0 and asked == [False]
    torch.testing.assert_close(told, written)
    assert attention._causal_mask(q, k, True) == {"is_causal": True}, (
        "where there is no mask cuDNN is left alone"
    )


def step_with_offsets() -> str:
    """What tensor-parallel ranks hold differently after a step, and should not."""
    layout = Layout(tp=2)
    with model_parallel(layout):
        stepper = small_run(layout, ["--model.softmax_type=learnable"]).stepper
        stepper.step(stepper.training_data(0))
        return stepper.describe_differences()


def test_ranks_hold_offsets_of_their_own_heads(ranks: RankPool) -> None:
    """softmax_type='learnable': as copies of one tensor they would end the run."""
    assert ranks(2).run(step_with_offsets) == ["", ""]
