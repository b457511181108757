"""Telemetry over ranks: its figures are those of the run's own tensors and codes, each element once."""

from collections import Counter

import pytest

from benchmarks.support.fp8_gpt import MOE
from benchmarks.support.ranks import Layout
from tests.support.long_cases import some
from tests.support.telemetry import counted, differences, losses, merged, reference, trained

LAYOUTS = {
    "alone": (1, Layout(), {}),
    "tensor and sequence": (2, Layout(tp=2, sp=True), {}),
    "tensor": (2, Layout(tp=2), {}),
    "data": (2, Layout(), {}),
    "pipeline": (2, Layout(pp=2), {}),
    "context": (2, Layout(cp=2), {}),
    "experts": (2, Layout(ep=2), {**MOE, "moe_ffn_hidden_size": 64}),
    "cut experts, each on two pairs": (
        4,
        Layout(tp=2, sp=True),
        {**MOE, "moe_ffn_hidden_size": 64, "num_layers": 1},
    ),
}


LONG = ("tensor", "cut experts, each on two pairs")


@pytest.mark.parametrize("name", some(LAYOUTS, *(name for name in LAYOUTS if name not in LONG)))
def test_figures_are_those_of_the_run_s_own_tensors(ranks, name):
    world, layout, fields = LAYOUTS[name]
    recipe = "tensorwise" if layout.sp or layout.pp > 1 else "mxfp8"
    results = ranks(world).run(trained, layout, recipe, fields, timeout=120)
    seen = merged(results)
    records = {(record["site"], record["tensor"]): record for record in results[0][0]}
    assert all(records == {(r["site"], r["tensor"]): r for r in found} for found, _ in results)
    assert records.keys() == seen.keys() and len(records) >= 48
    wrong = {key: wrong for key in seen if (wrong := differences(records[key], reference(seen[key])))}
    assert not wrong
    partial = {key for key, record in records.items() if record.get("partial")}
    split = layout.tp > 1
    assert {(site.rpartition(".")[2], tensor) for site, tensor in partial} == (
        {
            ("linear_qkv", "dgrad"),
            ("linear_fc1", "dgrad"),
            ("linear_proj", "output"),
            ("linear_fc2", "output"),
        }
        if split
        else set()
    )


def by_row(found):
    return {(record["site"], record["tensor"]): record for record in found}


@pytest.mark.parametrize(
    ("recipe", "distributed"),
    some([("delayed", True), ("mxfp8", True), ("blockwise", False)], ("mxfp8", True), ("blockwise", False)),
)
def test_fp8_weights_take_their_masters(ranks, recipe, distributed):
    """The plain optimizer's ranks have all of a master; the distributed one's have pieces, each of them once."""
    ddp = {"use_distributed_optimizer": distributed}
    fields = {"fp8_param": True, "num_layers": 3}  # the middle of the buffer cuts through a weight
    results = ranks(2).run(trained, Layout(), recipe, fields, ddp=ddp, steps=2)
    records, seen = by_row(results[0][0]), merged(results)
    weights = {key for key in records if key[1] == "weight"}
    assert len(weights) == 12 and weights <= seen.keys() == records.keys()
    assert distributed == any(len(seen[key]) == 2 for key in weights)
    wrong = {key: wrong for key in weights if (wrong := differences(records[key], reference(seen[key])))}
    assert not wrong


RECOMPUTED = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
}


@pytest.fixture(scope="module")
def plain(ranks):
    """The records of an iteration with nothing special, the second."""
    ((records, _),) = ranks(1).run(trained, Layout(), "delayed", steps=2)
    return records


@pytest.mark.parametrize("name", some(RECOMPUTED, "mlp"))
def test_a_recomputation_is_not_counted_twice(ranks, plain, name):
    ((records, _),) = ranks(1).run(trained, Layout(), "delayed", RECOMPUTED[name], steps=2)
    assert records == plain


def test_a_validation_is_not_counted(ranks, plain):
    ((records, _),) = ranks(1).run(trained, Layout(), "delayed", steps=2, validate=True)
    assert records == plain


def test_measuring_changes_no_bit(ranks):
    (off,), (on,) = (ranks(1).run(losses, Layout(), "delayed", every=every) for every in (0, 1))
    assert off == on


def test_iterations_that_are_not_measured_leave_no_trace(ranks, plain):
    ((records, _),) = ranks(1).run(trained, Layout(), "delayed", steps=2, every=2)
    assert records == plain


def test_sites_in_bf16_have_statistics_of_values(ranks):
    """Those of two ranks are those of one, but for rounding: no element twice, none left out."""
    ((alone, _),) = ranks(1).run(trained, Layout(), None)
    (two, _), (same, _) = ranks(2).run(trained, Layout(tp=2, sp=True), None)
    one, both = by_row(alone), by_row(two)
    assert two == same and len(one) == 48 and one.keys() == both.keys()
    assert {tensor for site, tensor in both if both[site, tensor].get("partial")} == {"output"}
    for key, record in one.items():
        assert not any("flow" in name for name in record)
        if not both[key].get("partial"):
            assert both[key]["l1_norm"] == pytest.approx(record["l1_norm"], rel=0.02), key


def test_layers_that_stay_in_bf16_are_measured_beside_the_others(ranks):
    fields = {"num_layers": 3, "first_last_layers_bf16": True}
    fields |= {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0}
    ((records, _),) = ranks(1).run(trained, Layout(), "tensorwise", fields)
    found = by_row(records)
    assert len(found) == 3 * 4 * 6
    assert {site.split(".")[2] for (site, _), record in found.items() if "mse" in record} == {"1", "2"}


def test_two_collectives_in_a_measured_iteration_and_none_in_others(ranks):
    for off, measured, between in ranks(2).run(counted, Layout(tp=2, sp=True), "tensorwise"):
        assert between == off
        added = Counter(measured) - Counter(off)
        assert added == {("all_reduce", "float64"): 2} and not Counter(off) - Counter(measured)
