"""Dense weights and experts have an optimizer each under expert parallelism: together they do what one rank's one does.

They clip by one norm, skip together, and keep their groups apart; test_resume.py has their resumed runs.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.fp8_gpt import DISTRIBUTED, FP32, MOE, NARROW, fp8_config, record_steps
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from tests.support.nonfinite_models import made_sick, masters

OPTIONS: dict[str, Any] = {"sequence": 64, "micro_batch": 1, "global_batch": 4}
FIELDS = {**NARROW, **MOE, "moe_ffn_hidden_size": 128, "moe_grouped_gemm": True, **FP32}
ILL, STEPS = 1, 4
CLIP = 0.05  # an optimizer that clipped by its own part's norm would step further


def steps(layout: Layout, ddp: dict[str, Any]) -> dict[str, Any]:
    """A rank case: several iterations, one of them with a NaN on the last rank."""
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    stepped: list[bool] = []
    optim: dict[str, Any] = {"clip_grad": CLIP}
    if not ddp:  # what SGD does depends on the size of a gradient, Adam's steps hardly
        optim |= {"optimizer": "sgd", "lr": 0.5, "sgd_momentum": 0.9}
    with model_parallel(layout):
        config = fp8_config(layout, "blockwise", **FIELDS)
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=OPTIONS["sequence"], ddp=ddp)
        optimizer = build_optimizer(config, chunks, ddp=ddp, optim=optim)
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        record_steps(optimizer, stepped)
        losses, norms, moved = [], [], []
        for step in range(STEPS):
            before = [masters(part) for part in parts]
            ill = step == ILL and dist.get_rank() == dist.get_world_size() - 1
            with made_sick(chunks[0], "gradients", math.nan) if ill else nullcontext():
                loss, norm = train_step(config, chunks, optimizer, step, **OPTIONS)
            losses.append(loss)
            norms.append(norm)
            moved.append([masters(part) != was for part, was in zip(parts, before, strict=True)])
        groups = [len(part.param_groups) for part in parts]
    return {"losses": losses, "norms": norms, "moved": moved, "stepped": stepped, "groups": groups}


@pytest.mark.parametrize("ddp", [{}, DISTRIBUTED], ids=["whole", "sharded"])
def test_two_optimizers_are_one(ranks: RankPool, ddp: dict[str, Any]) -> None:
    (one,) = ranks(1).run(steps, Layout(), ddp)
    assert len(one["groups"]) == 1 and one["norms"][0] > 2 * CLIP
    for found in ranks(2).run(steps, Layout(ep=2), ddp):
        assert len(found["groups"]) == 2 and found["groups"][0] > 1, "dense weights and experts, biases apart"
        assert found["stepped"] == one["stepped"] == [step != ILL for step in range(STEPS)]
        assert found["moved"] == [[step != ILL] * 2 for step in range(STEPS)], found["moved"]
        taken = [step for step in range(STEPS) if step != ILL]
        for what, tolerance in (("losses", 1e-5), ("norms", 1e-3)):
            mine, reference = (torch.tensor([run[what][step] for step in taken]) for run in (found, one))
            torch.testing.assert_close(mine, reference, rtol=tolerance, atol=0)
        assert found["losses"][0] != found["losses"][-1]
