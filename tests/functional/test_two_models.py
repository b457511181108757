"""Two models in one process, of copies of one config: what is found in one skips its own optimizer's step alone."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from benchmarks.support.fp8_gpt import OPTIONS, fp8_config
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from tests.support.nonfinite_models import made_sick, masters

FP32 = {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32}
KINDS: dict[str, tuple[int, Layout, dict[str, Any], dict[str, Any]]] = {
    "float32": (1, Layout(), FP32, {}),
    "distributed": (2, Layout(), {}, {"use_distributed_optimizer": True}),
    "pipeline": (2, Layout(pp=2), {}, {}),
}


def a_model(config: Any, ddp: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """(config, chunks, optimizer, the optimizer's step, which train_step does not take)."""
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=128, ddp=ddp)
    optimizer = build_optimizer(config, chunks, ddp=ddp)
    step = optimizer.step
    optimizer.step = lambda: (True, 0.0, None)
    return config, chunks, optimizer, step


def health_of_two(layout: Layout, fields: dict[str, Any], ddp: dict[str, Any]) -> list[Any]:
    """A rank case: per iteration, who is ill, whose forward and step came first, and of each model whether its step was
    taken, whether its masters changed, and what was counted."""
    import torch.distributed as dist

    from megatron_fp8.mcore.iteration import iteration_counts, set_training_length

    found = []
    with model_parallel(layout):
        config = fp8_config(layout, "delayed", **fields)
        set_training_length(config, 4)
        models = [a_model(c, ddp) for c in (config, copy.deepcopy(config))]
        orders = [(0, (0, 1), (0, 1)), (0, (1, 0), (1, 0)), (1, (0, 1), (1, 0)), (1, (1, 0), (0, 1))]
        for index, (ill, forward, step) in enumerate(orders):  # the others are these with the models swapped
            for which in forward:
                config, chunks, optimizer, _ = models[which]
                sick = which == ill and dist.get_rank() == 0
                with made_sick(chunks[0], "weights", math.nan) if sick else nullcontext():
                    train_step(config, chunks, optimizer, index, **OPTIONS)
            before = [masters(optimizer) for _, _, optimizer, _ in models]
            taken = {which: bool(models[which][3]()[0]) for which in step}
            changed = [masters(m[2]) != was for m, was in zip(models, before, strict=True)]
            bad = [iteration_counts(m[0])["nonfinite"] > 0 for m in models]
            found.append((ill, [taken[0], taken[1]], changed, bad))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_optimizer_heeds_its_own_model(ranks: RankPool, kind: str) -> None:
    world, layout, fields, ddp = KINDS[kind]
    for found in ranks(world).run(health_of_two, layout, fields, ddp):
        assert len(found) == 4
        for ill, taken, changed, bad in found:
            well = [which != ill for which in (0, 1)]
            assert taken == changed == well, found
            assert bad == [not ok for ok in well], found
