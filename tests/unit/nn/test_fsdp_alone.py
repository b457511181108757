"""fully_shard on one process, as on a machine with one GPU: torch then copies where it would gather."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_fp8.nn import Fp8Config, convert_to_fp8
from megatron_fp8.nn.fsdp import enable_fp8_all_gather
from megatron_fp8.nn.step import fp8_step


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_codes_of_one_process_are_those_of_the_model_that_is_not_sharded(alone, recipe):
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        linears = torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.Linear(128, 256))
        return convert_to_fp8(linears.bfloat16(), config=Fp8Config(recipe=recipe))

    plain, sharded = model(), model()
    enable_fp8_all_gather(sharded)
    mesh = init_device_mesh("cpu", (1,))
    for linear in sharded:
        fully_shard(linear, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    for _ in range(2):  # the second gather fills what the first one made
        for each in (plain, sharded):
            each.zero_grad()
            y = each(x)
            y.float().square().sum().backward()
            fp8_step(each)
        assert torch.equal(plain(x), sharded(x))
        for one, other in zip(plain.parameters(), sharded.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad.to_local())


@pytest.mark.filterwarnings("error:.* was replaced since")
def test_evaluation_between_steps_has_the_training_forwards_bits(alone):
    """The weight that a forward reads is another parameter than the one that the optimizer stepped."""
    torch.manual_seed(0)
    model = convert_to_fp8(torch.nn.Sequential(torch.nn.Linear(64, 64)), "delayed")
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, grown = torch.randn(16, 64), 0
    for _ in range(6):
        model.train()(x).square().mean().backward()
        fp8_step(model)
        optimizer.step()
        optimizer.zero_grad()
        slot = model[0].fp8_site.casts["weight"].rowwise.slot
        grown += bool(model[0].weight.to_local().abs().max() * slot.scale > 448)
        with torch.no_grad():
            assert torch.equal(model.eval()(x), model.train()(x))
    assert grown > 2, "no weight outgrew its scale: nothing was tested"
