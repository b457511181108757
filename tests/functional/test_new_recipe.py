"""A recipe of one's own: one class and one row of the table, and it trains under Megatron-Core and in any model."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.support.fp8_gpt import Watched, watched_training
from benchmarks.support.ranks import Layout, RankPool
from megatron_fp8.nn import Fp8Config, convert_to_fp8, fp8_matmul, fp8_step
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.recipe import RECIPES, ROW, Recipe, Rule


# The whole of it: scales per token, E5M2 inputs, E4M3 gradients.
@dataclass(frozen=True)
class PerToken(Recipe):
    margin: int = 0

    def rule(self, role: str) -> Rule:
        return Rule(E5M2 if role == "input" else E4M3, ROW, "fp32", margin=self.margin)


table = mock.patch.dict(RECIPES, {"per-token": PerToken})


def trained() -> Watched:
    with table:
        return watched_training(Layout(), "per-token", {"fp8_margin": 1}, {}, steps=2)


def test_it_trains_under_megatron(ranks: RankPool) -> None:
    seen = ranks(1).run(trained)[0]
    assert seen.losses[1] < seen.losses[0]
    assert {precision for _, _, precision in seen.gemms} == {"fp8"} and seen.gemms.total() == 48
    sites = [entry for entry in seen.report if entry["layer"] is not None]
    assert {entry["recipe"] for entry in sites} == {"per-token"}
    assert {tuple(entry["roles"].values()) for entry in sites} == {
        ("e5m2 row fp32", "e4m3 row fp32", "e4m3 row fp32")
    }


@table
def test_it_trains_in_any_model() -> None:
    torch.manual_seed(0)
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)), "per-token")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, target, losses = torch.randn(40, 32), torch.randn(40, 16), []
    for _ in range(4):
        loss = (model(x) - target).square().mean()
        loss.backward()
        assert fp8_step(model).fp8_gemms == 5  # no gradient of the first layer's input
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert model[0].fp8_site.plan.rules["input"] == Rule(E5M2, ROW, "fp32")
    with pytest.raises(ValueError, match="backward_format='e4m3' does not exist for 'per-token'"):
        Fp8Config(recipe="per-token", backward_format="e4m3")
    a, b = torch.randn(5, 32), torch.randn(32, 7)
    assert (fp8_matmul(a, b, "per-token") - a @ b).norm() < 0.1 * (a @ b).norm()


def test_it_is_gone_with_its_row() -> None:
    with pytest.raises(ValueError, match="'per-token' is unknown: use one of delayed, tensorwise"):
        convert_to_fp8(nn.Linear(32, 32), "per-token")
