"""The bias of each expert that balances a router without a loss: a step that is skipped moves none, on any rank."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.fp8_gpt import DEEPSEEK, OPTIONS, fp8_config, record_steps
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from tests.support.nonfinite_models import made_sick

FP16 = {"bf16": False, "fp16": True, "params_dtype": torch.float16}
NO_OUTPUT_LAYER = {"mtp_num_layers": None}


def biases_by_step(
    recipe: str | None, fields: dict[str, Any], sick: dict[int, tuple[str, float]], optim: dict[str, Any]
) -> tuple[list[bool], list[list[float]]]:
    """A rank case: of five steps over two expert parallel ranks, one of which is sick in some, whether each was
    taken, and all biases before the first and after each."""
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    stepped: list[bool] = []
    with model_parallel(Layout(ep=2)):
        config = fp8_config(Layout(ep=2), recipe, **{**DEEPSEEK, **NO_OUTPUT_LAYER, **fields})
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=OPTIONS["sequence"])
        optimizer = build_optimizer(config, chunks, optim=optim)
        record_steps(optimizer, stepped)

        def biases() -> list[float]:
            found = [buffer for name, buffer in chunks[0].named_buffers() if name.endswith("expert_bias")]
            return torch.cat(found).tolist()

        seen = [biases()]
        for step in range(5):
            ill = step in sick and dist.get_rank() == 1
            with made_sick(chunks[0], *sick[step]) if ill else nullcontext():
                train_step(config, chunks, optimizer, step, **OPTIONS)
            seen.append(biases())
    return stepped, seen


CASES: dict[str, tuple[Any, ...]] = {
    "delayed": ("delayed", {}, {1: ("inputs", math.nan), 3: ("weights", math.inf)}, {}),
    # In BF16 Megatron-Core looks for NaN where it has a scale.
    "bf16": (None, {}, {1: ("gradients", math.nan), 3: ("gradients", math.inf)}, {"loss_scale": 1.0}),
    "fp16": (
        "mxfp8",
        FP16,
        {1: ("gradients", math.inf), 3: ("gradients", math.nan)},
        {"initial_loss_scale": 256.0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_skipped_step_moves_no_bias(ranks: RankPool, name: str) -> None:
    everyone = ranks(2).run(biases_by_step, *CASES[name])
    for stepped, seen in everyone:
        assert stepped == [True, False, True, False, True]
        for taken, before, after in zip(stepped, seen[:-1], seen[1:], strict=True):
            assert (before != after) == taken
            moved = {round(abs(a - b) * 1e3, 3) for a, b in zip(before, after, strict=True)}
            assert moved <= {0.0, 1.0}, "by moe_router_bias_update_rate, or where it is"
    assert everyone[0] == everyone[1]
