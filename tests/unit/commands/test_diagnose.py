"""What `megatron-fp8 diagnose` writes for people and for `--model.fp8_overrides`."""

from __future__ import annotations

import yaml

from megatron_fp8 import diagnose
from megatron_fp8.commands.diagnose import format_table, overrides_text
from megatron_fp8.commands.diagnosis_plot import draw
from megatron_fp8.plan.overrides import check_overrides
from tests.support.planted import batches, loss_of, trained, wrong_scale


def test_overrides_table_and_plot_of_a_site_that_stands_out(tmp_path):
    model, _ = trained(0)
    with wrong_scale(model, "blocks.1.fc2", "dgrad", 2.0):
        found = diagnose(model, loss_of, batches(0))
    text = overrides_text({"*.qkv": "mxfp8", **found.overrides}, found)
    loaded = yaml.safe_load(text)
    assert loaded == {"*.qkv": "mxfp8", "blocks.1.fc2:dgrad": "bf16"}, "the run's own come first"
    assert list(loaded) == ["*.qkv", "blocks.1.fc2:dgrad"]
    check_overrides(loaded, "fp8_overrides")
    assert text.startswith("# ") and "100% of that" in text
    lines = format_table(found).splitlines()
    assert lines[2].startswith("| blocks.1.fc2:dgrad ") and "times that of rounding alone" in lines[2]
    assert len(lines) == 2 + len(found.ranking)
    draw(found, tmp_path / "plot.png", "a run")
    assert (tmp_path / "plot.png").stat().st_size > 5000
