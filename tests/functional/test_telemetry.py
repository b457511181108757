"""Telemetry over ranks: its figures are those of the run's own tensors and codes, each element once."""

from __future__ import annotations

import pytest

from tests.support.fp8_gpt import MOE
from tests.support.ranks import Layout
from tests.support.telemetry import differences, merged, reference, trained

LAYOUTS = {
    "alone": (1, Layout(), {}),
    "tensor and sequence": (2, Layout(tp=2, sp=True), {}),
    "tensor": (2, Layout(tp=2), {}),
    "data": (2, Layout(), {}),
    "pipeline": (2, Layout(pp=2), {}),
    "context": (2, Layout(cp=2), {}),
    "experts": (2, Layout(ep=2), {**MOE, "moe_ffn_hidden_size": 64}),
}


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_figures_are_those_of_the_run_s_own_tensors(ranks, name, recipe):
    world, layout, fields = LAYOUTS[name]
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
