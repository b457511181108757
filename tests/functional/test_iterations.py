"""What belongs to an iteration, on two ranks and in Megatron-Core's models (tests/unit/nn/test_iteration.py has more)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.fp8_gpt import MOE, NARROW, digest, fp8_config
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.nn import convert_to_fp8, fp8_state_dict, load_fp8_state_dict, register_fp8_step
from tests.support.long_cases import some
from tests.support.small_training import DELAYED, Tower, batch, sgd, train


def sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A tower under fully_shard, and an optimizer whose steps end iterations."""
    model = convert_to_fp8(Tower(seed), DELAYED)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    register_fp8_step(optimizer, model)
    return model, optimizer


def loading_case(fp8_first: bool) -> bool:
    twin, twins = sharded(0)
    train(twin, twins, range(3), hook=True)
    weights, moments = copy.deepcopy(get_state_dict(twin, twins))
    fp8 = fp8_state_dict(twin)
    expected = train(twin, twins, range(3, 6), hook=True)

    model, optimizer = sharded(5)
    if fp8_first:
        load_fp8_state_dict(model, fp8)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    if not fp8_first:
        load_fp8_state_dict(model, fp8)
    assert train(model, optimizer, range(3, 6), hook=True) == expected
    mine, theirs = fp8_state_dict(model), fp8_state_dict(twin)
    return all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("fp8_first", [True, False])
def test_distributed_checkpoint_loads_in_any_order_under_fully_shard(
    ranks: RankPool, fp8_first: bool
) -> None:
    assert ranks(2).run(loading_case, fp8_first, timeout=120) == [True, True]


def one_rank_saves_case() -> int:
    """Plain SGD has no state: get_optimizer_state_dict steps it, here on one rank alone."""
    model = convert_to_fp8(Tower(), DELAYED)
    wrapped = DistributedDataParallel(model)
    optimizer = sgd(model)
    register_fp8_step(optimizer, wrapped)
    for step in range(3):
        train(wrapped, optimizer, range(step, step + 1), hook=True)
        if dist.get_rank() == 0:
            get_optimizer_state_dict(model, optimizer)
    return int(fp8_state_dict(model)["up.iteration"])


def test_one_rank_may_save_alone(ranks: RankPool) -> None:
    assert ranks(2).run(one_rank_saves_case, timeout=60) == [3, 3]


class Branches(nn.Module):
    """FP8 layers in a branch that the data of one rank alone goes through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branch, self.rest = Tower(), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, through: bool) -> torch.Tensor:
        y: torch.Tensor = self.rest(self.branch(x) if through else x)
        return y


def idle_rank_case() -> tuple[int, float]:
    model = convert_to_fp8(Branches(), DELAYED, skip=["rest"])
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = sgd(model)
    register_fp8_step(optimizer, wrapped)
    for step in range(3):
        wrapped(batch(step), dist.get_rank() == 0).square().mean().backward()
        optimizer.step()
        if step == 1:
            optimizer.step()  # nothing ran since the last
        optimizer.zero_grad()
    saved = fp8_state_dict(model)
    return int(saved["branch.up.iteration"]), float(saved["branch.up.input.scale"])


def test_a_rank_on_which_nothing_ran_ends_the_iteration_of_the_others(ranks: RankPool) -> None:
    first, second = ranks(2).run(idle_rank_case, timeout=60)
    assert first == second and first[0] == 3
    largest = max(float(batch(step).detach().abs().max()) for step in range(3))
    assert first[1] == float(torch.tensor(448.0) / torch.tensor(largest))


# ----------------------------------------------------------------------------------------------------- Megatron-Core


def megatron_case(layout: Layout, recipe: str, fields: dict[str, Any]) -> list[Any]:
    """Two iterations with all modules in training mode, and in evaluation mode: what each saw."""
    from megatron_fp8.mcore.iteration import iteration_counts
    from megatron_fp8.mcore.runtime import state_of
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    found = []
    for training in (True, False):
        with model_parallel(layout):
            config = fp8_config(layout, recipe, **{**NARROW, **fields})
            chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=64, vocab=128)
            optimizer = build_optimizer(config, chunks)
            if not training:
                for chunk in chunks:
                    chunk.train = lambda mode, chunk=chunk: nn.Module.train(chunk, False)
            seen: list[Any] = []
            for step in range(2):
                options = {"micro_batch": 2, "global_batch": 4, "sequence": 64, "vocab": 128}
                seen += [*train_step(config, chunks, optimizer, step, **options), digest(chunks)]
                counts = iteration_counts()
                seen += [counts["fp8_gemms"], counts["hp_gemms"], counts["nonfinite"]]
            (arena,) = state_of(config).arenas[:1]
            seen += [arena.scale.tolist(), [slot.warm for slot in arena.slots], arena.last_amax.tolist()]
        found.append(seen)
    return found


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("delayed", {**MOE, "moe_grouped_gemm": True}),
    "experts one by one": ("mxfp8", MOE),
    "fp8_param": ("delayed", {"fp8_param": True}),
}


@pytest.mark.parametrize("case", some(CASES, "experts", "fp8_param"))
def test_megatron_in_evaluation_mode_trains_as_in_training_mode(ranks: RankPool, case: str) -> None:
    training, evaluation = ranks(1).run(megatron_case, Layout(), *CASES[case], timeout=300)[0]
    assert training == evaluation


def test_megatron_in_evaluation_mode_on_two_ranks(ranks: RankPool) -> None:
    for training, evaluation in ranks(2).run(
        megatron_case, Layout(tp=2, sp=True), "delayed", {}, timeout=300
    ):
        assert training == evaluation


def test_megatron_in_evaluation_mode_recomputed(ranks: RankPool) -> None:
    """Losses, weights, scales and amaxes; the forward of Megatron-Core's checkpoint, under no_grad, is not counted."""
    training, evaluation = ranks(1).run(megatron_case, Layout(), "delayed", FULL, timeout=300)[0]
    counts = [3, 9]
    assert all(training[i] > evaluation[i] > 0 for i in counts)
    assert [x for i, x in enumerate(training) if i not in counts] == [
        x for i, x in enumerate(evaluation) if i not in counts
    ]


def dispatched_case() -> list[Any]:
    return megatron_case(Layout(ep=2), "mxfp8", {**MOE, "moe_grouped_gemm": True, "moe_fp8_dispatch": True})


def test_tokens_in_fp8_in_evaluation_mode(ranks: RankPool) -> None:
    for training, evaluation in ranks(2).run(dispatched_case, timeout=300):
        assert training == evaluation


def probe_case(trains_input: bool, rate_at_first: float) -> list[int]:
    """The iterations that a head of one output counts, whose only row is rank 0's, behind a frozen FP8 backbone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    convert_to_fp8(model, DELAYED)
    model[0].requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step else rate_at_first)
    register_fp8_step(optimizer, model)
    found = []
    for step in range(2):
        x = batch(step + 10 * dist.get_rank()).requires_grad_(trains_input)
        model(x).square().mean().backward()
        optimizer.step()
        warmup.step()
        found.append(model[0].fp8_group.iteration)
    return found


@pytest.mark.parametrize(("trains_input", "rate_at_first"), [(False, 1.0), (True, 0.0)])
def test_a_rank_whose_shard_is_empty_ends_the_iteration_with_the_others(
    ranks: RankPool, trains_input: bool, rate_at_first: float
) -> None:
    assert ranks(2).run(probe_case, trains_input, rate_at_first, timeout=100) == [[1, 2], [1, 2]]


def alone_after_no_grad_case() -> int:
    """Rank 0 alone looks at the model in training mode, without gradients, and saves a stateless optimizer's state."""
    model = convert_to_fp8(Tower(), DELAYED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    register_fp8_step(optimizer, model)
    train(model, optimizer, range(1), hook=True)
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(batch(3))
        for parameter in model.parameters():  # as torch.distributed.checkpoint.state_dict does
            parameter.grad = torch.zeros_like(parameter)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
    return model.up.fp8_group.iteration


def test_one_rank_may_save_alone_after_a_forward_without_gradients(ranks: RankPool) -> None:
    assert ranks(2).run(alone_after_no_grad_case, timeout=60) == [1, 1]
