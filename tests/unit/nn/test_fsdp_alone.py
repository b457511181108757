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
