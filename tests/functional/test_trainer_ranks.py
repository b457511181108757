"""Fp8Trainer on two gloo ranks: what one rank meets, both skip; two ranks train what one would."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.ranks import RankPool

SICK = {1: "input", 3: "loss", 5: "reduced gradient"}
STEPS = 8


def model_of(recipe: str | None, wrap: str) -> torch.nn.Module:
    from megatron_fp8.nn import convert_to_fp8

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    if recipe is not None:
        convert_to_fp8(model, recipe)
    return fully_shard(model) if wrap == "fsdp" else DistributedDataParallel(model)


def batch(step: int, part: int) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + part))


def sick_training(
    recipe: str | None, wrap: str
) -> tuple[list[Any], list[float], list[bool], list[list[float]]]:
    """A rank case: steps of two microbatches; in some of them rank 1 meets an Inf, once where only it can see it.

    Returns the steps, the scale after each, whether weights changed in it, and all weights at the end.
    """
    from megatron_fp8.nn import trainer as module
    from megatron_fp8.state.loss_scaler import LossScaler

    sick_rank, step_now = dist.get_rank() == 1, 0

    def compute_loss(model: torch.nn.Module, x: Tensor) -> Tensor:
        ill = SICK.get(step_now) if sick_rank else None
        if ill == "input":
            x = x.clone()
            x[2, 3] = math.inf
        loss = (model(x) - x.flip(1)).square().mean()
        return loss * math.inf if ill == "loss" else loss

    model = model_of(recipe, wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = module.Fp8Trainer(
        model, optimizer, compute_loss, scaler=LossScaler(hysteresis=1), clip_grad=1.0
    )
    unscale, steps, scales, changed = module.unscale_, [], [], []

    def unscale_sick(grads: Any, scale: float) -> bool:
        grads = list(grads)
        if sick_rank and SICK.get(step_now) == "reduced gradient":
            local = grads[0].to_local() if hasattr(grads[0], "to_local") else grads[0]
            local.view(-1)[1] = math.nan
        return unscale(grads, scale)

    with mock.patch.object(module, "unscale_", unscale_sick):
        for step_now in range(STEPS):
            before = [local(p).clone() for p in model.parameters()]
            rank = dist.get_rank()
            steps.append(trainer.train_step(batch(step_now, 2 * rank), batch(step_now, 2 * rank + 1)))
            assert trainer.scaler is not None
            scales.append(trainer.scaler.scale)
            changed.append(not all(map(torch.equal, before, (local(p) for p in model.parameters()))))
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return steps, scales, changed, [p.detach().flatten().tolist() for p in whole]


def local(parameter: Any) -> Tensor:
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()


@pytest.mark.parametrize("recipe", [None, "delayed", "mxfp8"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_one_ranks_overflow_is_skipped_by_both(ranks: RankPool, recipe: str | None, wrap: str) -> None:
    if wrap == "fsdp" and recipe == "mxfp8":
        recipe = "tensorwise"
    everyone = ranks(2).run(sick_training, recipe, wrap)
    clean = [step not in SICK for step in range(STEPS)]
    for steps, scales, changed, _ in everyone:
        assert [not step.skipped for step in steps] == changed == clean
        assert scales == [2.0**16, *[2.0**15] * 2, *[2.0**14] * 2, *[2.0**13] * 3]
        assert [step.nonfinite for step in steps] == [step.nonfinite for step in everyone[0][0]]
        losses = [step.loss for step, good in zip(steps, clean, strict=True) if good]
        assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    assert everyone[0][3] == everyone[1][3], "the ranks' weights differ"


def saved_training(folder: str) -> tuple[bool, int]:
    """A rank case: whether training resumed from rank 0's file goes on with the same bits; reductions of 6 steps."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from megatron_fp8.nn.trainer import Fp8Trainer
    from megatron_fp8.state.loss_scaler import LossScaler

    def compute_loss(model: torch.nn.Module, x: Tensor) -> Tensor:
        return (model(x) - x.flip(1)).square().mean()

    def started() -> Fp8Trainer:
        model = model_of("delayed", "ddp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return Fp8Trainer(model, optimizer, compute_loss, scaler=LossScaler(growth_interval=3), clip_grad=1.0)

    def steps(trainer: Fp8Trainer, first: int) -> list[Any]:
        return [trainer.train_step(batch(first + i, dist.get_rank()), batch(first + i, 2)) for i in range(3)]

    reductions: list[Any] = []

    def counting(group, bucket):  # torch checks annotations, and has no name for them as text
        reductions.append(bucket)
        return allreduce_hook(group, bucket)

    whole = started()
    assert isinstance(whole.model, DistributedDataParallel)
    whole.model.register_comm_hook(None, counting)
    steps(whole, 0)
    if dist.get_rank() == 0:
        whole.save(Path(folder) / "state.pt")
    dist.barrier()
    again = started()
    again.load(Path(folder) / "state.pt")
    assert steps(whole, 3) == steps(again, 3)
    assert whole.scaler == again.scaler and whole.scaler != LossScaler(growth_interval=3)
    return all(map(torch.equal, whole.model.parameters(), again.model.parameters())), len(reductions)


def test_ranks_resume_from_one_file_and_reduce_once_a_step(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(saved_training, str(tmp_path)) == [(True, 6)] * 2
