"""Options of Megatron-Core's router that change experts' tokens or gradients: each trains in FP8 and changes the training
that lacks it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.support.fp8_gpt import MOE, NARROW, fp8_config
from benchmarks.support.gpt import train
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from tests.support.long_cases import some

OPTIONS: dict[str, Any] = {"sequence": 64, "micro_batch": 2, "global_batch": 4}
BASE = {**NARROW, **MOE, "moe_ffn_hidden_size": 128, "moe_grouped_gemm": True}


def two_iterations(fields: dict[str, Any]) -> dict[str, Any]:
    """A rank case: losses and gradient norms, how many products were FP8, and the most tokens of an expert and of all."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_fp8.mcore.iteration import iteration_counts
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    tokens: list[list[int]] = []

    def listen(step: int, run: Any) -> None:
        if step:
            return
        for module in run.chunks[0].modules():
            if isinstance(module, SequentialMLP):
                module.register_forward_pre_hook(lambda _, args: tokens.append(args[1].tolist()))

    with model_parallel():
        config = fp8_config(Layout(), "blockwise", **{**BASE, **fields})
        run = train(config, spec=get_gpt_layer_fp8_spec, steps=2, on_step=listen, **OPTIONS)
        return {
            "trained": (run.losses, run.grad_norms),
            "gemms": iteration_counts()["fp8_gemms"],
            "most": max(max(counts) for counts in tokens),
            "sent": {sum(counts) for counts in tokens},
        }


SIGMOID = {"moe_router_score_function": "sigmoid"}
SHARED = {"moe_shared_expert_intermediate_size": 128}
TOP_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
CAPACITY = {"moe_expert_capacity_factor": 0.5}
COEFF = {"moe_aux_loss_coeff": 0.1}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "top 1": (TOP_1, {}),
    "sigmoid": (SIGMOID, {}),
    "bias": ({**SIGMOID, "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.1}, SIGMOID),
    "aux loss by sequence": ({**COEFF, "moe_router_load_balancing_type": "seq_aux_loss"}, {}),
    "sinkhorn": ({**TOP_1, "moe_router_load_balancing_type": "sinkhorn"}, TOP_1),
    "z loss": ({"moe_z_loss_coeff": 0.1}, {}),
    "capacity": (CAPACITY, {}),
    "capacity, padded": ({**CAPACITY, "moe_pad_expert_input_to_capacity": True}, {}),
    "float64": ({"moe_router_dtype": "fp64"}, {}),
    "probabilities on the input": ({**TOP_1, "moe_apply_probs_on_input": True}, TOP_1),
    "shared, gated": ({**SHARED, "moe_shared_expert_gate": True}, SHARED),
}
"""Options, and those of the training that lacks what is asked for."""


@pytest.fixture(scope="module")
def trained(ranks: RankPool) -> Any:
    known: dict[str, dict[str, Any]] = {}

    def run(fields: dict[str, Any]) -> dict[str, Any]:
        key = repr(sorted(fields.items()))
        if key not in known:
            known[key] = ranks(1).run(two_iterations, fields)[0]
        return known[key]

    return run


LONG = ("sinkhorn", "z loss", "float64")


@pytest.mark.parametrize("name", some(CASES, *(name for name in CASES if name not in LONG)))
def test_option_trains_and_does_something(trained: Any, name: str) -> None:
    fields, without = CASES[name]
    found, other = trained(fields), trained(without)
    losses, norms = found["trained"]
    assert all(map(math.isfinite, [*losses, *norms])) and losses[1] < losses[0]
    assert found["trained"] != other["trained"]
    # of each layer and micro-batch an expert may have no tokens
    assert found["gemms"] >= other["gemms"] - 24 > 0


TOKENS = 64 * 2
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared, while tokens travel": (
        {**SHARED, "moe_shared_expert_gate": True, "moe_shared_expert_overlap": True},
        {**SHARED, "moe_shared_expert_gate": True},
    ),
    "dispatched by an all-gather": ({"moe_token_dispatcher_type": "allgather"}, {}),
}


@pytest.mark.parametrize("name", SAME)
def test_option_that_only_sends_otherwise(trained: Any, name: str) -> None:
    fields, without = SAME[name]
    assert trained(fields)["trained"][0] == pytest.approx(trained(without)["trained"][0], rel=1e-3)


def test_capacity_drops_tokens(trained: Any) -> None:
    """At most half of an even share goes to an expert; padded, as many go to each."""
    most = int(0.5 * TOKENS * 2 / 4)
    assert trained({})["sent"] == {2 * TOKENS}
    dropped, padded = trained(CAPACITY), trained({**CAPACITY, "moe_pad_expert_input_to_capacity": True})
    assert dropped["most"] == most and max(dropped["sent"]) <= 4 * most
    assert padded["most"] == most and padded["sent"] == {4 * most}


def test_padding_for_quantization_adds_tokens_without_weight(trained: Any) -> None:
    """Megatron-Core's, of tokens that count for nothing; experts here need none."""
    padded, plain = trained({"moe_router_padding_for_quantization": True}), trained({})
    assert padded["trained"][0][0] == pytest.approx(plain["trained"][0][0], rel=1e-6)
    assert all(count % 16 == 0 for count in padded["sent"]) and max(padded["sent"]) > 2 * TOKENS
