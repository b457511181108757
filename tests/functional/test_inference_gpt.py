"""Inference with Megatron-Core's GPT: training's bytes, a KV cache, Megatron's own wrapper, tensor parallelism."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from benchmarks.support.fp8_gpt import FP32, MOE, RECIPES, fp8_config
from benchmarks.support.gpt import VOCAB, build_chunks
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.inference import Sampler, make_batch_invariant, model_bytes, prepare_for_inference
from megatron_fp8.inference.calibration import calibrate, fp8_modules
from megatron_fp8.mcore.generation import Decoder, generate
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
from tests.support.decoding import exact_attention, forward
from tests.support.long_cases import some

LENGTH, BATCH = 40, 2
GPT_LIKE = "rowwise, GPT-like"  # learned positions, biases, LayerNorm
PER_TOKEN = ("rowwise", "blockwise", "mxfp8", "static", "delayed", GPT_LIKE)


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(3))


def build(layout: Layout, recipe: str | None, **fields: Any) -> Any:
    chunk = build_chunks(fp8_config(layout, recipe, **fields), spec=get_gpt_layer_fp8_spec)[0]
    return chunk.module  # without DistributedDataParallel, whose buffer would keep the weights


def ready(recipe: str) -> tuple[Any, torch.Tensor]:
    """A model prepared for inference, and the logits of its training forward before that; 'static' is calibrated."""
    named = {"static": "tensorwise", GPT_LIKE: "rowwise"}.get(recipe, recipe)
    model = build(Layout(), named, llama=recipe != GPT_LIKE)
    calibration = None
    if recipe in ("static", "delayed"):
        calibration = calibrate(model, [tokens()], lambda ids: forward(model, ids))
    if recipe == "delayed":
        assert calibration is not None
        assert calibration.fill_history(model) == 2 * 8
        calibration = None
    model.train()
    trained = forward(model, tokens()).detach()
    return prepare_for_inference(model, calibration=calibration), trained


def in_batches(recipe: str | None, fields: dict[str, Any]) -> list[bool]:
    """A rank case: whether sequences have the same logits in batches of 7, 1, 2 and 4, decoded and in whole forwards."""
    ids = torch.randint(VOCAB, (7, LENGTH), generator=torch.Generator().manual_seed(3))
    with model_parallel(Layout()):
        model = build(Layout(), recipe, **fields)
        if recipe is None:
            make_batch_invariant(model)
        else:
            calibration = calibrate(model, [ids[:2]], lambda ids: forward(model, ids))
            prepare_for_inference(
                model, calibration=calibration if recipe == "nvfp4" else None, batch_invariant=True
            )
        model.requires_grad_(False)
        logits = (decode(model, ids, [33, 1, 1, 5]), forward(model, ids))
        same = []
        for chosen in ([6], [3], [5, 0], [1, 2, 4, 6]):
            part = ids[chosen]
            some_logits = (decode(model, part, [33, 1, 1, 5]), forward(model, part))
            same += [torch.equal(a, b[chosen]) for a, b in zip(some_logits, logits, strict=True)]
        prompt, sampler = ids[:, :5], Sampler(vocab_size=VOCAB)
        seeds = [torch.Generator().manual_seed(i) for i in range(7)]
        drawn = torch.stack([*generate(Decoder(model, 7, 9), prompt, 4, sampler, generator=seeds)])
        own = [torch.Generator().manual_seed(5)]
        alone = torch.stack([*generate(Decoder(model, 1, 9), prompt[5:6], 4, sampler, generator=own)])
        return [*same, torch.equal(alone[:, 0], drawn[:, 5])]


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        (None, FP32),
        ("tensorwise", FP32),
        ("nvfp4", {"llama": False}),
        ("tensorwise", {**MOE, "moe_grouped_gemm": True}),
    ],
    ids=["float32", "tensorwise, float32", "nvfp4, GPT-like", "tensorwise, experts"],
)
def test_a_sequence_does_not_depend_on_its_batch(
    ranks: RankPool, recipe: str | None, fields: dict[str, Any]
) -> None:
    assert ranks(1).run(in_batches, recipe, fields)[0] == [True] * 9


def decode(model: Any, ids: torch.Tensor, parts: list[int]) -> torch.Tensor:
    """Logits of all tokens, given to a KV cache in parts of these lengths."""
    decoder = Decoder(model, len(ids), LENGTH, every_token=True)
    found = torch.cat([decoder(part) for part in ids.split(parts, 1)], 1)
    assert decoder.length == ids.shape[1]
    return found


def decoding(recipe: str) -> dict[str, torch.Tensor]:
    """A rank case: logits in training, in inference, and decoded with attention that sums in one order: with prompts of
    1 and 39 tokens, and in pieces."""
    with model_parallel(Layout()):
        model, trained = ready(recipe)
        ids = tokens()
        with torch.no_grad():
            found = {"trained": trained, "full": forward(model, ids)}
            with mock.patch("megatron_fp8.mcore.layers.attention._sdpa", exact_attention):
                found["exact full"] = forward(model, ids)
                for prompt in (1, 39):
                    parts = [prompt, *[1] * (LENGTH - prompt)]
                    found[f"exact prompt {prompt}"] = decode(model, ids, parts)
                found["exact pieces"] = decode(model, ids, [7, 12, 1, 20])
    return found


_known: dict[str, dict[str, torch.Tensor]] = {}


@pytest.fixture
def decoded(ranks: RankPool) -> Any:
    def get(recipe: str) -> dict[str, torch.Tensor]:
        if recipe not in _known:
            _known[recipe] = ranks(1).run(decoding, recipe)[0]
        return _known[recipe]

    return get


@pytest.mark.parametrize("recipe", some([*RECIPES, GPT_LIKE], "delayed", "tensorwise", "mxfp8", GPT_LIKE))
def test_logits_are_the_training_forwards_bytes(decoded, recipe):
    found = decoded(recipe)
    assert_same_bytes(found["full"], found["trained"])


PARTS = ("prompt 1", "prompt 39", "pieces")


@pytest.mark.parametrize("recipe", some(PER_TOKEN, "mxfp8", "static", "delayed", GPT_LIKE))
def test_decoding_adds_nothing_of_fp8_where_a_tokens_scales_are_its_own(decoded, recipe):
    """With attention that does not depend on the order of its sums, decoding gives the whole forward's bytes."""
    found = decoded(recipe)
    for parts in PARTS:
        assert_same_bytes(found[f"exact {parts}"], found["exact full"], parts)


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def test_decoding_with_one_dynamic_scale_differs_less_than_fp8_from_bf16(decoded, ranks):
    """Tensorwise, a token's codes depend on its company: what that costs is bounded by what quantizing costs at all."""
    found = decoded("tensorwise")
    bf16 = ranks(1).run(high_precision)[0]
    cost = rms(found["trained"] - bf16["full"])
    for parts in PARTS:
        assert 0 < rms(found[f"exact {parts}"] - found["exact full"]) < cost, parts
    # Attention alone, in BF16, differs by far less.
    assert 0 < rms(bf16["prompt 1"] - bf16["full"]) < 0.2 * cost


def high_precision() -> dict[str, torch.Tensor]:
    """A rank case: BF16's logits, whole and decoded."""
    with model_parallel(Layout()):
        model = build(Layout(), None).eval().requires_grad_(False)
        return {"full": forward(model, tokens()), "prompt 1": decode(model, tokens(), [1] * LENGTH)}


def through_megatrons_wrapper() -> tuple[torch.Tensor, torch.Tensor, int]:
    """A rank case: GPTInferenceWrapper prepares the model and runs it, as Megatron-Core's engines do."""
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
        InferenceWrapperConfig,
    )

    with model_parallel(Layout()):
        model = build(Layout(), "mxfp8")
        model.train()
        trained = forward(model, tokens()).detach()
        wanted = InferenceWrapperConfig(
            hidden_size=256,
            inference_batch_times_seqlen_threshold=-1,
            fp32_residual_connection=False,
            params_dtype=torch.bfloat16,
            padded_vocab_size=VOCAB,
            inference_max_requests=BATCH,
            inference_max_seq_length=LENGTH,
            fp8="hybrid",
        )
        context = StaticInferenceContext(BATCH, LENGTH)
        wrapper = GPTInferenceWrapper(model, wanted, context)
        wrapper.prep_model_for_inference()
        positions = torch.arange(LENGTH).expand(BATCH, -1)
        logits = wrapper.run_one_forward_step(
            {"tokens": tokens(), "position_ids": positions, "attention_mask": None}
        )
        return logits, trained, len(model.fp8_inference.sites)


def test_megatrons_own_inference_wrapper_runs_fp8(ranks):
    logits, trained, sites = ranks(1).run(through_megatrons_wrapper)[0]
    assert sites == 8
    assert_same_bytes(logits[:, -1], trained[:, -1])


def over_two_ranks(recipe: str) -> tuple[torch.Tensor, torch.Tensor, list[list[int]], int]:
    """A rank case, TP=2: training forward, inference forward, and sampled tokens."""
    layout = Layout(tp=2)
    with model_parallel(layout):
        model = build(layout, recipe)
        model.train()
        trained = forward(model, tokens()).detach()
        prepare_for_inference(model)
        with torch.no_grad():
            full = forward(model, tokens())
        decoder = Decoder(model, BATCH, LENGTH)
        import torch.distributed as dist

        draws = torch.Generator().manual_seed(dist.get_rank())  # only rank 0's may count
        made = [
            t.tolist() for t in generate(decoder, tokens(5), 12, Sampler(vocab_size=300), generator=draws)
        ]
        return trained, full, made, model.fp8_inference.sites[0].bytes_after


def padded_in_sequence_parallel() -> tuple[torch.Tensor, torch.Tensor]:
    """A rank case, TP=2 with sequence parallelism: training's logits, and inference's with padding asked for."""
    layout = Layout(tp=2, sp=True)
    with model_parallel(layout):
        model = build(layout, "rowwise")
        model.train()
        trained = forward(model, tokens()).detach()
        prepare_for_inference(model, pad_tokens=32)
        with torch.no_grad():
            return trained, forward(model, tokens())


def test_padding_keeps_out_of_sequence_parallelism(ranks):
    """There a linear's output has other tokens than its input: of all ranks, or of this one."""
    for trained, inferred in ranks(2).run(padded_in_sequence_parallel):
        assert_same_bytes(inferred, trained)


def calibrated_over(size: int) -> dict[str, tuple[tuple[int, int], float]]:
    """A rank case: shape and amax of every site, with TP over this many ranks."""
    with model_parallel(Layout(tp=size)):
        model = build(Layout(tp=size), "tensorwise")
        found = calibrate(model, [tokens()], partial(forward, model), group=torch.distributed.group.WORLD)
        calibration_fits(model, found)
        return {name: (r.shape, r.amax) for name, r in found.ranges.items()}


def calibration_fits(model: Any, calibration: Any) -> None:
    calibration.check(fp8_modules(model))


def test_a_calibration_does_not_depend_on_tensor_parallelism(ranks):
    """The same sites and shapes, so that one rank uses what two have measured; the ranges differ by BF16's rounding."""
    (alone,), (first, second) = ranks(1).run(calibrated_over, 1), ranks(2).run(calibrated_over, 2)
    assert first == second and list(first) == list(alone)
    for name, (shape, amax) in alone.items():
        assert first[name][0] == shape, name
        assert first[name][1] == pytest.approx(amax, rel=0.02), name


@pytest.mark.parametrize("recipe", some(["tensorwise", "mxfp8"], "tensorwise"))
def test_tensor_parallel_ranks_generate_together(ranks, recipe):
    first, second = ranks(2).run(over_two_ranks, recipe)
    assert_same_bytes(first[1], first[0])
    assert_same_bytes(second[1], first[1])
    assert first[2] == second[2] and len(first[2]) == 12
    assert all(0 <= token < 300 for step in first[2] for token in step)


def refusals() -> list[str]:
    said = []

    def refused(attempt: Any) -> None:
        with pytest.raises(ValueError) as error:
            attempt()
        said.append(str(error.value))

    with model_parallel(Layout()):
        model = build(Layout(), "rowwise")
        decoder = Decoder(model, BATCH, 8)
        refused(lambda: decoder(tokens(9)))
        refused(lambda: decoder(tokens(3)[:1]))
        refused(lambda: Decoder(model, 0, 8))
        refused(lambda: next(generate(decoder, tokens(5), 5, lambda *_: None)))
        assert decoder.length == 0
        decoder(tokens(8))
        refused(lambda: decoder(tokens(1)))
        decoder.reset()
        decoder(tokens(8))
        model.module.config.sequence_parallel = True
        refused(lambda: Decoder(model, BATCH, 8))
    return said


def test_what_does_not_fit_is_refused(ranks):
    said = ranks(1).run(refusals)[0]
    for text, part in zip(
        said,
        [
            "tokens [2, 9]",
            "2 sequences are needed",
            "must be at least 1",
            "a prompt of 5 tokens and 5 more",
            "from 1 to 0 tokens",
            "sequence_parallel: decoding takes one token at a time",
        ],
        strict=True,
    ):
        assert part in text


def fp8_parameters(recipe: str) -> tuple[int, int, torch.Tensor, torch.Tensor]:
    """A rank case: weights that live as FP8 already; of two-way ones a direction is dropped."""
    with model_parallel(Layout()):
        keep = "fp4_param" if recipe == "nvfp4" else "fp8_param"
        model = build(Layout(), recipe, **{keep: True})
        model.train()
        trained = forward(model, tokens()).detach()
        before = model_bytes(model)
        prepare_for_inference(model)
        with torch.no_grad():
            return before, model_bytes(model), trained, forward(model, tokens())


@pytest.mark.parametrize(("recipe", "saved"), [("blockwise", False), ("mxfp8", True), ("nvfp4", True)])
def test_weights_that_live_as_fp8_keep_their_codes(ranks, recipe, saved):
    before, after, trained, full = ranks(1).run(fp8_parameters, recipe)[0]
    assert_same_bytes(full, trained)
    assert (after < before) if saved else (after == before)
