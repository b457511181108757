"""The cost of each GEMM in several formats, and the plan that is chosen by it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from megatron_fp8.diagnosis.format_costs import (
    FormatPlan,
    GemmCost,
    check_formats,
    check_passes,
    choose_plan,
    format_table,
    measure_formats,
    overrides_of,
    plan_text,
    time_of,
)
from megatron_fp8.diagnosis.model_runner import ModuleRunner, restore_after
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.plan.resolve import SiteRequest, named_recipes, resolve
from megatron_fp8.recipe import RECIPES
from tests.support.model_faults import batches, grow_channel, loss_of, trained

FORMATS = ("mxfp8", "nvfp4")
GEMMS = ("fprop", "dgrad", "wgrad")
CPU = torch.device("cpu")


class Runner(ModuleRunner):
    """A model in this process whose sites take overrides."""

    def site_with(self, name: str, overrides: Any) -> GemmSite:
        named = named_recipes(overrides, self.recipe)
        plan = resolve(SiteRequest(RECIPES["mxfp8"](), named, overrides=overrides), name, None, CPU)
        return GemmSite(plan, self.sites[name].state, None)

    def recipe(self, name: str) -> Any:
        return RECIPES[name]()


def measured(model: Any, budget: float, formats: tuple[str, ...] = FORMATS) -> FormatPlan:
    runner = Runner(model, loss_of, batches(3))
    arenas = {id(arena): arena for site in runner.sites.values() for arena in site.state.arenas}
    slots = [len(arena.slots) for arena in arenas.values()]
    with restore_after(runner.model, runner.sites):
        found = measure_formats(runner, formats, budget, 1000)
    assert [len(arena.slots) for arena in arenas.values()] == slots, "an experiment left slots"
    return found


def cost(site: str, gemm: str, fmt: str, value: float) -> GemmCost:
    return GemmCost(site, gemm, fmt, 0.0, 0.0, 0.0, value)


def test_the_most_time_for_the_cost_is_saved_within_the_budget() -> None:
    """a has twice b's FLOPs. For its cost nvfp4 saves most in a's fprop; b's is too dear; dgrad in nvfp4 is no number."""
    costs = [
        cost("a", "fprop", "mxfp8", 0.01), cost("a", "fprop", "nvfp4", 0.012),
        cost("b", "fprop", "mxfp8", 0.01), cost("b", "fprop", "nvfp4", 0.5),
        cost("b", "dgrad", "mxfp8", 0.0), cost("b", "dgrad", "nvfp4", math.inf),
        cost("b", "wgrad", "mxfp8", 0.02), cost("b", "wgrad", "nvfp4", 0.02),
    ]  # fmt: skip
    flops = {"a": 2000, "b": 1000}
    chosen = [
        (0.0, "bf16 bf16 mxfp8 bf16"), (0.011, "bf16 mxfp8 mxfp8 bf16"), (0.0125, "nvfp4 bf16 mxfp8 bf16"),
        (0.03, "nvfp4 mxfp8 mxfp8 bf16"), (0.042, "nvfp4 mxfp8 mxfp8 nvfp4"), (math.inf, "nvfp4 nvfp4 mxfp8 nvfp4"),
    ]  # fmt: skip
    for budget, formats in chosen:
        found = choose_plan(costs, flops, budget)
        assert " ".join(found.values()) == formats, budget
        assert sum(one.cost for one in costs if found[one.site, one.gemm] == one.format) <= budget


def test_a_layer_that_no_format_can_hold_stays_in_high_precision() -> None:
    """One channel of a block's input is 2^20 times the others, its weights as much smaller: BF16 multiplies both, and in
    blocks that share a scale the other channels become zero."""
    model, _ = trained(3, "mxfp8")
    healthy = measured(model, 0.1)
    grow_channel(model, 1, 2.0**20)
    found = measured(model, 0.1)
    worst = sorted(found.costs, key=lambda one: -one.cost)[:2]
    assert {(one.site, one.gemm, one.cost > 0.1) for one in worst} == {("blocks.1.fc1", "fprop", True)}
    assert found.loss == pytest.approx(healthy.loss, rel=0.02), "in BF16 it is the same model"
    assert found.gemms["blocks.1.fc1"]["fprop"] == "bf16" != healthy.gemms["blocks.1.fc1"]["fprop"]
    quantized = [fmt for gemms in found.gemms.values() for fmt in gemms.values() if fmt != "bf16"]
    assert "nvfp4" in quantized and found.whole <= 0.1
    assert found.time == pytest.approx(time_of(found.gemms, found.flops)) and found.time < 0.6


def test_costs_are_those_of_one_gemm_alone() -> None:
    """A dgrad or wgrad does not change the loss of its batch; MXFP8 is nearer to high precision than NVFP4."""
    model, _ = trained(0, "mxfp8", blocks=1)
    found = measured(model, 0.05)
    assert len(found.costs) == 2 * 3 * 2 and set(found.gemms) == {"blocks.0.fc1", "blocks.0.fc2"}
    by = {(one.site, one.gemm, one.format): one for one in found.costs}
    for (site, gemm, fmt), one in by.items():
        assert (one.loss_change == 0) == (gemm != "fprop"), (site, gemm)
        assert 0 < one.distance < 0.5 and one.cost >= one.distance**2
        assert fmt == "nvfp4" or one.distance < by[site, gemm, "nvfp4"].distance
    width = 2 * 48 * 32
    assert found.flops == {"blocks.0.fc1": width * 64, "blocks.0.fc2": width * 64}
    assert 4 * (2 + 12 + 1) + 1 <= found.passes <= check_passes(1000, 4, 2, FORMATS)


def test_a_plan_that_costs_more_as_a_whole_is_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_fp8.diagnosis import format_costs

    model, _ = trained(0, "mxfp8", blocks=1)
    right = format_costs._Trial._cost
    budget = measured(model, 1.0, ("nvfp4",)).summed * 0.8
    once = measured(model, budget, ("nvfp4",))

    def dear(self: Any, found: Any) -> float:
        return right(self, found) * (2 if found.name.startswith("the plan") else 1)

    monkeypatch.setattr(format_costs._Trial, "_cost", dear)
    found = measured(model, budget, ("nvfp4",))
    assert found.whole <= budget < 2 * once.whole and found.time > once.time


def test_without_a_format_that_fits_there_is_no_plan() -> None:
    model, _ = trained(0, "mxfp8", blocks=1)
    found = measured(model, 1e-9)
    assert (found.gemms, found.overrides, found.time, found.whole) == ({}, {}, 1.0, 0.0)
    assert plan_text(found).startswith("No GEMM costs less than 1e-09 of the loss")
    assert "| bf16 |" in format_table(found).splitlines()[2]


def test_words_table_and_figures_hold_both_the_sum_and_the_whole() -> None:
    costs = [cost("a.b", gemm, "nvfp4", 0.001) for gemm in GEMMS] + [cost("c.d", "fprop", "nvfp4", math.inf)]
    plan = {"a.b": dict.fromkeys(GEMMS, "nvfp4")}
    found = FormatPlan(
        ("nvfp4",), 0.01, costs, {"a.b": 6, "c.d": 2}, 2.5, plan, 0.25, 0.003, 0.0041, 0.001, 0.0004, 0.06
    )
    text = plan_text(found)
    assert (
        "3 in nvfp4" in text and "0.003 in sum, as a whole 0.0041" in text and "above the budget" not in text
    )
    assert "bf16 1, nvfp4 0.25" in text
    found.whole = 0.02
    assert "above the budget" in plan_text(found)
    lines = format_table(found).splitlines()
    assert "c.d:fprop" in lines[2] and "not finite" in lines[2] and lines[3].endswith("| nvfp4 |")
    values = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert values["overrides"] == {"a.b": "nvfp4"} and values["costs"][3]["cost"] == "Infinity"
    assert values["relative_time"] == {"bf16": 1.0, "nvfp4": 0.25} and values["summed"] == 0.003


def test_overrides_are_a_site_s_most_frequent_format_and_exceptions() -> None:
    plan = {
        "a": dict.fromkeys(GEMMS, "bf16"),
        "b": dict(zip(GEMMS, ("mxfp8", "nvfp4", "nvfp4"), strict=True)),
        "c": dict(zip(GEMMS, ("bf16", "mxfp8", "nvfp4"), strict=True)),
    }
    assert list(overrides_of(plan).items()) == [
        ("a", "bf16"), ("b", "nvfp4"), ("b:fprop", "mxfp8"), ("c", "bf16"), ("c:dgrad", "mxfp8"), ("c:wgrad", "nvfp4"),
    ]  # fmt: skip


def test_bad_formats_and_budgets_are_refused() -> None:
    assert check_formats("bf16, nvfp4,mxfp8,nvfp4") == ("nvfp4", "mxfp8")
    for text, words in (
        ("bf16", "names no format besides bf16"),
        ("nvfp4,delayed", "'delayed' must be one of bf16"),
    ):
        with pytest.raises(ValueError, match=words):
            check_formats(text)
    assert check_passes(121, 4, 4, ("nvfp4",) * 2) == 4 * (2 + 24 + 4) + 1
    with pytest.raises(ValueError, match="--budget 120: 12 GEMMs in 2 formats need 121 passes"):
        check_passes(120, 4, 4, ("nvfp4",) * 2)
