"""A recipe of one's own: one class and one row of the table, and it trains under Megatron-Core and in any model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.support.fp8_gpt import Watched, watched_training
from benchmarks.support.ranks import Layout, RankPool
from megatron_fp8.backends import emulated
from megatron_fp8.estimate import activations
from megatron_fp8.estimate.config_reader import read
from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.nn import Fp8Config, convert_to_fp8, fp8_matmul, fp8_step
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.recipe import BLOCK_1X32, RECIPES, ROW, Recipe, Rule


# The whole of it: scales per token, E5M2 inputs, E4M3 gradients.
@dataclass(frozen=True)
class PerToken(Recipe):
    margin: int = 0

    def rule(self, role: str) -> Rule:
        return Rule(E5M2 if role == "input" else E4M3, ROW, "fp32", margin=self.margin)


@dataclass(frozen=True)
class BlocksOf32(Recipe):
    def rule(self, role: str) -> Rule:
        return Rule(E4M3, BLOCK_1X32, "pow2")


table = mock.patch.dict(RECIPES, {"per-token": PerToken, "blocks-of-32": BlocksOf32})
ALIGNED = {"per-token": 16, "blocks-of-32": 32}


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


def padded_for_experts() -> dict[str, int]:
    """A rank case: recipe -> the rows that Megatron-Core makes of an expert's one token."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    found = {}
    with table:
        for name in ALIGNED:
            experts = SimpleNamespace(config=SimpleNamespace(fp8="e4m3", fp8_recipe=name))
            found[name] = len(
                SequentialMLP._pad_tensor_for_quantization(experts, torch.ones(1, 8), torch.ones(1))[0]
            )
    return found


def test_megatron_gives_experts_the_tokens_that_its_blocks_want(ranks: RankPool) -> None:
    assert ranks(1).run(padded_for_experts) == [ALIGNED]


@table
@pytest.mark.parametrize("name", ALIGNED)
def test_an_estimate_counts_those_tokens(name: str) -> None:
    # The rule of the key was made with the table as it was.
    settings = read(["--config=tiny_gpt_cpu", "--model.num_moe_experts=4", "--model.moe_router_topk=1"])
    model = replace(settings.model, fp8_recipe=name)

    def kept(rows: int) -> int:
        """Bytes, of what grows with an expert's tokens alone, where each of four has so many."""
        train = replace(settings.train, micro_batch_size=1, seq_length=4 * rows)
        asked = replace(settings, model=model, train=train)
        return activations.saved_by_layer(asked, model.layers[0])["activation function"]

    assert kept(1) == kept(16) and kept(17) == kept(32)
    assert (kept(1) == kept(32)) == (ALIGNED[name] == 32)


@table
@pytest.mark.parametrize("name", ALIGNED)
def test_inference_gives_kernels_those_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(emulated, "takes_any_size")
    model, rows = convert_to_fp8(nn.Sequential(nn.Linear(32, 32)), name), []
    prepare_for_inference(model)
    model[0].register_forward_pre_hook(lambda linear, args: rows.append(args[0].shape[:-1].numel()))
    assert model(torch.randn(5, 32)).shape == (5, 32)
    assert rows == [ALIGNED[name]]
