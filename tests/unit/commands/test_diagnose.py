"""What `megatron-fp8 diagnose` writes for people and for `--model.fp8_overrides`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from megatron_fp8 import diagnose
from megatron_fp8.commands.diagnose import format_table, overrides_text
from megatron_fp8.commands.diagnosis_plot import draw
from megatron_fp8.commands.parting import told_apart
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


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_table_fits_a_narrow_terminal(width):
    model, _ = trained(0)
    with wrong_scale(model, "blocks.1.fc2", "dgrad", 2.0):
        found = diagnose(model, loss_of, batches(0))
    found.ranking = [replace(one, site=f"decoder.layers.17.{one.site}.linear_qkv") for one in found.ranking]
    lines = format_table(found, width=width).splitlines()
    assert max(map(len, lines)) <= width and len(lines) == 2 + len(found.ranking)
    assert lines[2].startswith("| * ") and ".linear_qkv:dgrad " in lines[2]
    assert [line[2] == "*" for line in lines[2:]] == [one.stands_out for one in found.ranking]
    assert "stands out by" in format_table(found, width=200).splitlines()[0]


@pytest.mark.parametrize(
    ("pair", "texts"),
    [((5.96925687, 2.85089159), ("5.969", "2.851")), ((2.850891, 2.850892), ("2.850891", "2.850892"))],
)
def test_two_losses_have_as_many_digits_as_it_takes_to_tell_them_apart(pair, texts):
    assert told_apart(*pair) == texts


def test_what_is_no_number_is_told_as_it_is():
    assert told_apart(None, 2.5) == ("None", "2.5")
