"""Losses and gradient norms of short trainings: each recipe, each kind of layout, converted models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.support.fp8_gpt import DEEPSEEK, DISTRIBUTED, MOE, NARROW, RECIPES, fp8_config
from benchmarks.support.gpt import train
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8 import convert_to_fp8, fp8_step

STEPS = 3
FP8_PARAM: dict[str, Any] = {"fp8_param": True}
GROUPED: dict[str, Any] = {**MOE, "moe_grouped_gemm": True}

# Name -> ranks, layout, recipe, fields of the config, options of benchmarks.support.gpt.train
GPT: dict[str, tuple[int, Layout, str | None, dict[str, Any], dict[str, Any]]] = {
    **{f"one rank, {recipe}": (1, Layout(), recipe, {}, {}) for recipe in (None, *RECIPES)},
    "biases and tied embedding, delayed": (1, Layout(), "delayed", {}, {"tied": True}),
    "first and last in BF16, blockwise": (
        1,
        Layout(),
        "blockwise",
        {"num_layers": 3, "first_last_layers_bf16": True},
        {},
    ),
    "recomputation, delayed": (
        1,
        Layout(),
        "delayed",
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {},
    ),
    "tensor parallel, delayed": (2, Layout(tp=2), "delayed", {}, {}),
    "sequence parallel, mxfp8": (2, Layout(tp=2, sp=True), "mxfp8", {}, {}),
    "stages, tensorwise": (2, Layout(pp=2), "tensorwise", {}, {}),
    "interleaved stages, rowwise": (2, Layout(pp=2, vpp=2), "rowwise", {"num_layers": 4}, {}),
    "context parallel, rowwise": (2, Layout(cp=2), "rowwise", {}, {}),
    "distributed optimizer, FP8 parameters, blockwise": (
        2,
        Layout(),
        "blockwise",
        FP8_PARAM,
        {"ddp": DISTRIBUTED},
    ),
    "distributed optimizer, FP8 parameters, mxfp8": (2, Layout(), "mxfp8", FP8_PARAM, {"ddp": DISTRIBUTED}),
    "experts one by one, tensorwise": (2, Layout(ep=2), "tensorwise", MOE, {}),
    "grouped experts, delayed": (2, Layout(ep=2), "delayed", GROUPED, {}),
    "grouped experts, mxfp8": (1, Layout(), "mxfp8", GROUPED, {}),
    "DeepSeek's architecture, blockwise": (2, Layout(tp=2, sp=True, ep=2, etp=1), "blockwise", DEEPSEEK, {}),
}


def _of_gpt(
    layout: Layout, recipe: str | None, fields: dict[str, Any], options: dict[str, Any]
) -> list[tuple[str, str]]:
    """A rank case: (loss, gradient norm) of each step, in hexadecimal."""
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    with model_parallel(layout):
        config = fp8_config(layout, recipe, **{**NARROW, **fields})
        run = train(
            config,
            spec=get_gpt_layer_fp8_spec,
            steps=STEPS,
            sequence=128,
            micro_batch=1,
            global_batch=4,
            **options,
        )
    return [(loss.hex(), norm.hex()) for loss, norm in zip(run.losses, run.grad_norms, strict=True)]


def of_gpt(ranks: RankPool, name: str) -> list[list[str]]:
    """Of the last rank, which has the loss."""
    world, *case = GPT[name]
    return [list(pair) for pair in ranks(world).run(_of_gpt, *case)[-1]]


CONVERTED = (*RECIPES, "blockwise, compiled")


def of_converted(name: str) -> list[str]:
    """Losses of a converted model, three microbatches an iteration, in hexadecimal; values that every machine makes."""
    recipe, _, compiled = name.partition(", ")

    def exact(*shape: int, seed: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(-128, 128, shape, generator=draw) / 2.0 ** torch.randint(
            8, 18, shape, generator=draw
        )

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128, bias=False), nn.Linear(128, 32))
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(exact(*parameter.shape, seed=seed))
    convert_to_fp8(model, recipe)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    for step in range(STEPS):
        for microbatch in range(3):
            loss = run(exact(48, 64, seed=100 + 3 * step + microbatch)).square().mean()
            loss.backward()
            losses.append(loss.item().hex())
        fp8_step(model)
        optimizer.step()
        optimizer.zero_grad()
    return losses
