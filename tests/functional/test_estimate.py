"""Estimates against counts: parameters, state and the wire, to the byte, of trainings in many layouts; activations."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from typing import Any

import pytest

from benchmarks.scale import status_allreduces
from benchmarks.support.fp8_gpt import RECIPES
from benchmarks.support.ranks import RankPool
from megatron_fp8.estimate.activations import saved_by_chunk
from megatron_fp8.estimate.communication import stage_traffic
from megatron_fp8.estimate.config_reader import Settings, read
from megatron_fp8.estimate.model import Chunk
from megatron_fp8.estimate.model_state import stage_state
from megatron_fp8.estimate.parameter_counts import chunk_parameters, totals
from tests.support.estimate_cases import (
    BIASED,
    CASES,
    DISTRIBUTED,
    FP4,
    LATENT,
    MOE,
    MTP,
    ONE,
    OUTPUT,
    PIPELINE,
)
from tests.support.estimates import GELU, TINY, count_held, count_saved, largest, options
from tests.support.long_cases import some

# Experts that tensor parallelism cuts are not here: gloo does not gather the pieces of different sizes that they need.
EXPERTS = {
    f"experts, {recipe}, {'fp8_param' if fp8_param else 'bf16 weights'}, {name}": (
        4,
        TINY,
        {
            **MOE, **layout, **DISTRIBUTED, "model__expert_model_parallel_size": 2,
            "model__fp8_format": recipe, "model__fp8_param": fp8_param,
        },
    )
    for recipe in RECIPES
    for fp8_param in (False, True)
    for name, layout in (
        ("dp4", ONE),
        ("tp2 sp", {"model__expert_tensor_parallel_size": 1}),
    )
}  # fmt: skip

LONG = {
    f"{recipe}, {'fp8_param' if fp8_param else 'bf16 weights'}, {name}, {'sharded' if sharded else 'whole'}, {state}": (
        4,
        config,
        {
            **layout, "model__fp8_format": recipe, "model__fp8_param": fp8_param,
            "optimizer__use_distributed_optimizer": sharded, "optimizer__state_dtype": state,
        },
    )
    for recipe in RECIPES
    for fp8_param in (False, True)
    for name, config, layout in (
        ("tp2 sp", TINY, {}),
        ("tp2 sp tied", GELU, {}),
        ("dp4", TINY, ONE),
        ("pp2", TINY, PIPELINE),
        ("pp2 tied", GELU, PIPELINE),
    )
    for sharded in (False, True)
    for state in ("float32", "fp8")
} | EXPERTS  # fmt: skip


def hold(ranks: RankPool, world: int, config: str, changes: dict[str, Any]) -> None:
    arguments = options(config, **changes)
    counts = ranks(world).run(count_held, arguments)
    settings = read(arguments, gpus=world)
    model = settings.model
    found = totals(model)
    unshared = sum(
        p.size for chunk in model.chunks() for p in chunk_parameters(model, chunk) if p.copy and not p.tied
    )
    everything = found.total + found.padding + found.prediction + unshared
    assert everything == counts[0]["parameters"]
    for stage in range(model.pipeline_model_parallel_size):
        chunks = [chunk for chunk in model.chunks() if chunk.stage == stage]
        there = next(count for count in counts if count["stage"] == stage)
        assert [[(p.name, p.shape) for p in chunk_parameters(model, chunk)] for chunk in chunks] == there[
            "shapes"
        ]
        expected = Counter(dataclasses.asdict(stage_state(settings, chunks)))
        assert expected == largest(counts, stage), f"stage {stage}"
        # Where a token goes is the router's choice: what ranks send to experts is exact for all of them together.
        of_stage_ranks = [count["sent"] for count in counts if count["stage"] == stage]
        together = Counter[str]()
        for one in of_stage_ranks:
            together.update(one)
        expected = {call: size * len(of_stage_ranks) for call, size in sent(settings, chunks).items()}
        assert expected == dict(together), f"stage {stage}"
        for count in counts:
            if count["stage"] == stage:
                assert calls_of(settings, chunks) == count["calls"]


def calls_of(settings: Settings, chunks: list[Chunk]) -> dict[str, int]:
    """Calls by collective, with the verdicts and the one for the loss."""
    found = Counter({"all-reduce": 1})
    for one in (*stage_traffic(settings, chunks), *status_allreduces(settings, chunks)):
        found[one.call] += one.calls
    return dict(found)


def sent(settings: Settings, chunks: list[Chunk]) -> dict[str, int]:
    """Bytes of whole tensors by collective, those of up to four float32 numbers left out, as counted."""
    found: Counter[str] = Counter()
    for one in stage_traffic(settings, chunks):
        if one.bytes > 16 * one.calls:
            found[one.call] += one.bytes
    if settings.model.virtual_pipeline_model_parallel_size:
        del found["send"]  # not in batches then, and not counted
    return dict(found)


HERE = (
    "FP8 output layer, tied over stages, fp8_param", "mxfp8, fp8_param, sharded, three tokens predicted",
    "nvfp4, fp4_param, sharded",
    "delayed, interleaved, compact",
    "nvfp4, gathered codes, FP8 backward of some, weights in MXFP8 of others",
    "nvfp4, odd widths, columnwise codes made again", "FP32", "rowwise, gathered codes",
    "blockwise, shards not aligned", "blockwise, gathered, recomputed",
    "latent attention, experts, two tokens, all layouts",
)  # fmt: skip


@pytest.mark.parametrize("name", some(CASES, *HERE))
def test_state_and_wire_are_exact(ranks: RankPool, name: str) -> None:
    hold(ranks, *CASES[name])


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_state_and_wire_are_exact_everywhere(ranks: RankPool, name: str) -> None:
    hold(ranks, *LONG[name])


# -------------------------------------------------------------------------------------------------- saved for backward

MANY = {
    "train__seq_length": 256,
    "train__micro_batch_size": 4,
    "train__global_batch_size": 8,
}  # tokens, so that the last rows of experts matter little

SAVED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "as shipped": (2, TINY, {"train__micro_batch_size": 2}),
    "BF16, fused, normed queries": (1, TINY, {
        **ONE, "model__fp8": None, "model__bias_activation_fusion": True, "model__qk_layernorm": True,
    }),
    "mxfp8, biases, dropout": (1, GELU, {**ONE, "model__fp8_format": "mxfp8", "model__hidden_dropout": 0.1}),
    "rowwise, no wgrad in FP8": (2, GELU, {"model__fp8_format": "rowwise", "model__fp8_wgrad": False}),
    "blockwise, stored SwiGLU, FP8 output layer": (1, TINY, {
        **ONE, **OUTPUT, "model__fp8_format": "blockwise", "model__bias_activation_fusion": True,
        "model__activation_func_fp8_input_store": True,
    }),
    "norms and core attention recomputed": (1, TINY, {
        **ONE, "model__recompute_granularity": "selective",
        "model__recompute_modules": "[core_attn,layernorm]",
    }),
    "MLP recomputed": (1, TINY, {
        **ONE, "model__recompute_granularity": "selective", "model__recompute_modules": "[mlp]",
    }),
    "one layer recomputed": (1, TINY, {
        **ONE, "model__recompute_granularity": "full", "model__recompute_method": "block",
        "model__recompute_num_layers": 1,
    }),
    "experts in BF16, fused, a shared one": (2, TINY, {
        **ONE, **MOE, **MANY, "model__expert_model_parallel_size": 2, "model__fp8": None,
        "model__bias_activation_fusion": True, "model__moe_shared_expert_intermediate_size": 256,
    }),
    "latent attention, narrow values, no latent of queries": (1, TINY, {
        **ONE, **LATENT, "model__q_lora_rank": None, "model__v_head_dim": 32,
        "model__fp8_format": "blockwise",
    }),
    "latent attention, its up projections recomputed": (1, TINY, {
        **ONE, **LATENT, "model__recompute_granularity": "selective",
        "model__recompute_modules": "[mla_up_proj]",
    }),
    "two tokens predicted, recomputed": (1, TINY, {
        **ONE, **MTP, **OUTPUT, "model__recompute_granularity": "full", "model__recompute_method": "uniform",
        "model__recompute_num_layers": 1,
    }),
    "latent attention, biased experts in groups, two tokens": (2, TINY, {
        **ONE, **MOE, **MANY, **BIASED, **LATENT, **MTP, "model__num_layers": 2,
        "model__first_last_layers_bf16": False, "model__num_moe_experts": 8, "model__moe_layer_freq": [0, 1],
        "model__moe_grouped_gemm": True, "model__expert_model_parallel_size": 2,
        "model__fp8_format": "blockwise",
    }),
    "nvfp4": (2, TINY, {**FP4, **OUTPUT, "train__micro_batch_size": 2}),
    "nvfp4, grouped experts": (1, TINY, {**ONE, **MOE, **MANY, **FP4, "model__moe_grouped_gemm": True}),
    **{f"context parallel{kind}": (2, TINY, {
        **ONE, "model__context_parallel_size": 2, "model__cp_comm_type": kind.removeprefix(", ") or None,
    }) for kind in ("", ", p2p", ", a2a")},
}  # fmt: skip


SAVED_HERE = (
    "as shipped", "rowwise, no wgrad in FP8", "blockwise, stored SwiGLU, FP8 output layer",
    "norms and core attention recomputed", "MLP recomputed", "nvfp4",
    "latent attention, narrow values, no latent of queries",
    "latent attention, biased experts in groups, two tokens",
)  # fmt: skip


@pytest.mark.parametrize("name", some(SAVED, *SAVED_HERE))
def test_saved_activations_are_within_two_percent(ranks: RankPool, name: str) -> None:
    world, config, changes = SAVED[name]
    arguments = options(config, **changes)
    counted = statistics.mean(
        ranks(world).run(count_saved, arguments)
    )  # ranks get what the router sends them
    settings = read(arguments, gpus=world)
    (chunk,) = settings.model.chunks()
    found = saved_by_chunk(settings, chunk)
    print(
        f"{name}: counted {counted:,}, estimated {found.total():,} ({found.total() / counted - 1:+.2%}) {dict(found)}"
    )
    assert abs(found.total() / counted - 1) <= 0.02
