"""Planning: linears that are alike share a plan, and a part of a model has the names of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.support.gpt import gpt_config
from benchmarks.support.ranks import model_parallel
from megatron_fp8.linear.tensor_parallel import weight_of
from megatron_fp8.plan import resolve as resolver
from tests.support.fake_world import simulated
from tests.support.process_state import put_back

EXPERTS, LAYERS = 3, 4


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Megatron-Core is patched in this process, and its configs set variables."""
    with put_back():
        yield


def planned(**fields: Any) -> tuple[list[Any], list[str]]:
    """The linears of a small GPT with experts once it is planned, and the names that were resolved meanwhile."""
    from megatron.core.models.gpt import GPTModel

    from megatron_fp8 import TransformerConfig
    from megatron_fp8.mcore import sites
    from megatron_fp8.mcore.spec import get_gpt_decoder_block_fp8_spec

    moe = {"num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
    with simulated(0, 1), model_parallel():
        small = {"cls": TransformerConfig, "perform_initialization": False, "num_layers": LAYERS}
        config = gpt_config(**{**small, **moe, "fp8": "hybrid", "fp8_recipe": "delayed", **fields})
        spec = get_gpt_decoder_block_fp8_spec(config)
        with torch.device("meta"):
            model = GPTModel(config, spec, vocab_size=64, max_sequence_length=64)
        with mock.patch.object(sites, "resolve", wraps=sites.resolve) as resolve:
            sites.check_plan([model])
        linears = sites.fp8_linears([model])
        for linear in linears:
            plan = linear.fp8_site.plan
            alone = sites.resolve(config, plan.name, linear.fp8_layer, weight_of(linear).device)
            assert plan == alone
    return linears, [call.args[1] for call in resolve.call_args_list]


def test_alike_linears_are_planned_once() -> None:
    linears, resolved = planned()
    assert len(linears) == LAYERS * (2 + 2 * EXPERTS)
    assert len(resolved) == 1


def test_what_makes_a_linear_another_is_seen() -> None:
    name = "decoder.layers.2.mlp.experts.local_experts.1.linear_fc1"
    ends = {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
    linears, resolved = planned(fp8_overrides={name: "blockwise"}, first_last_layers_bf16=True, **ends)
    plans = {linear.fp8_site.plan.name: linear.fp8_site.plan for linear in linears}
    assert plans[name].as_dict()["recipe"] == "blockwise"
    assert plans[name.replace("fc1", "fc2")].as_dict()["recipe"] == "delayed"
    assert {plan.layer for plan in plans.values() if plan.precision == "bf16"} == {0, LAYERS - 1}
    assert {plan.layer for plan in plans.values() if plan.precision == "fp8"} == {1, 2}
    assert len(resolved) == 3  # the ends, the middle, and the one that is named
    groups = {linear.fp8_site.casts["input"].rowwise.slot.arena.group for linear in linears[10:20]}
    assert len(groups) == 2  # experts share amaxes with others than attention does


def test_each_linear_is_told_that_it_falls_back() -> None:
    with mock.patch.object(resolver, "warn_fallback") as said:
        linears, _ = planned(fp8_backend="native", fp8_fallback="warn")
    names = [call.args[0] for call in said.call_args_list]
    for linear in linears:
        assert names.count(linear.fp8_site.plan.name) == 2  # planned, and alone


@pytest.mark.parametrize("part_first", [False, True])
def test_a_part_has_the_sites_of_the_whole_whichever_is_prepared_first(part_first: bool) -> None:
    """The whole is of a class of the user's own, as Megatron-Core's schedules take it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import MegatronModule

    from megatron_fp8 import TransformerConfig
    from megatron_fp8.mcore import sites
    from megatron_fp8.mcore.spec import get_gpt_decoder_block_fp8_spec

    class Reward(MegatronModule):
        def __init__(self, config: Any):
            super().__init__(config)
            spec = get_gpt_decoder_block_fp8_spec(config)
            self.gpt = GPTModel(config, spec, vocab_size=64, max_sequence_length=64)

    with simulated(0, 1), model_parallel():
        config = gpt_config(cls=TransformerConfig, num_layers=1, fp8="hybrid", fp8_recipe="delayed")
        whole = Reward(config)
        part = whole.gpt
        sites.prepare([part if part_first else whole])
        first = [linear.fp8_site for linear in sites.fp8_linears([whole])]
        sites.prepare([whole, part])
        assert [linear.fp8_site for linear in sites.fp8_linears([whole])] == first
        assert all(site.plan.name.startswith("gpt.decoder.layers.0.") for site in first)
        (arena,) = {site.casts["input"].rowwise.slot.arena for site in first}
        assert len({slot.name for slot in arena.slots}) == len(arena.slots) == 3 * len(first)
        del whole
        alone = Reward(config).gpt  # its whole is gone
        sites.prepare([alone])
        assert alone.decoder.layers[0].mlp.linear_fc1.fp8_site.plan.name == "decoder.layers.0.mlp.linear_fc1"
