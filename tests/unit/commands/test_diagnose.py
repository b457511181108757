"""What `megatron-fp8 diagnose` writes for people and for `--model.fp8_overrides`."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from megatron_fp8 import diagnose
from megatron_fp8.commands.diagnose import (
    _check_files,
    _check_shards,
    _files,
    _good_loss,
    _Prepared,
    _with_recorded_loss,
    _write_all,
    format_table,
    overrides_text,
)
from megatron_fp8.commands.diagnosis_plot import draw
from megatron_fp8.commands.divergence import told_apart
from megatron_fp8.plan.overrides import check_overrides
from megatron_fp8.train.replay_check import OtherShards
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


def test_the_loss_that_the_run_had_is_the_best_of_ten_and_leaves_out_what_is_no_number(tmp_path):
    losses = [5.0, '"NaN"', None, '"Infinity"', *[3.0] * 9, *[2.0] * 10, 1.0]
    lines = [f'{{"iteration": {i}, "lm_loss": {json.dumps(x) if not isinstance(x, str) else x}}}\n'
             for i, x in enumerate(losses, 1)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert _good_loss(tmp_path, 12) is None, "nine losses"
    assert _good_loss(tmp_path, 13) == pytest.approx(3.2)
    assert _good_loss(tmp_path, 23) == 2.0
    (tmp_path / "metrics.jsonl").write_text('{"iteration": "1", "lm_loss": 2.0}\n')
    with pytest.raises(ValueError, match="has the iteration '1'"):
        _good_loss(tmp_path, 1)


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


class _Replayed:
    """A replay on one process of a run of two, whose loss is 3.6."""

    first = 11

    def __init__(self, recorded, asked=False):
        self.recorded, self.passes, self.subject = recorded, 0, self
        self.shards = OtherShards(["tensorwise"], {"tensor": (2, 1)}, 2, asked)

    @contextmanager
    def unrecorded(self):
        yield

    def run(self, batch):
        assert batch == 0
        return SimpleNamespace(loss=3.6)


@pytest.mark.parametrize(("recorded", "told"), [(0.53, "is 3.6 here, and was 0.53 in the run"), (None, "")])
def test_another_layout_s_scales_are_refused_unless_the_loss_agrees_or_they_are_asked_for(recorded, told):
    line = "megatron-fp8 launch --ranks 2 diagnose runs/x --iteration 11"
    with pytest.raises(ValueError, match=f"{told}.*{line}"):
        _check_shards(_Replayed(recorded), "runs/x --iteration 11")
    _check_shards(_Replayed(3.61), "")
    _check_shards(_Replayed(recorded, asked=True), "")


def test_a_verdict_begins_with_a_loss_that_is_not_the_run_s():
    model, _ = trained(0)
    found = diagnose(model, loss_of, batches(0))
    assert found.clean and _with_recorded_loss(found, _Replayed(found.attribution.planned.losses[0])) is found
    told = _with_recorded_loss(found, _Replayed(0.5))
    assert told.verdict.startswith("This is not what the run computed") and found.verdict in told.verdict
    assert not told.clean


def _writes(found, options, folder):
    replayed = SimpleNamespace(
        run=SimpleNamespace(model=SimpleNamespace(fp8_overrides={})), folder=folder, iteration=1
    )
    files = _files(SimpleNamespace(**{"json": None, "out": None, "plot": None, **options}), folder)
    _write_all(_Prepared(None, None, replayed, files, None), found, {})


def test_what_an_earlier_diagnosis_left_goes_where_the_new_one_has_none(tmp_path, capsys):
    model, _ = trained(0)
    with wrong_scale(model, "blocks.1.fc2", "dgrad", 2.0):
        ill = diagnose(model, loss_of, batches(0))
    _writes(ill, {}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"diagnosis.json", "diagnosis.png", "overrides.yaml"}
    _writes(replace(ill, overrides={}), {}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"diagnosis.json", "diagnosis.png"}
    _writes(replace(ill, overrides={}, ranking=[]), {}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"diagnosis.json"}
    said = capsys.readouterr().out
    assert f"removed     {tmp_path / 'overrides.yaml'} of an earlier diagnosis" in said
    assert f"removed     {tmp_path / 'diagnosis.png'} of an earlier diagnosis" in said


def test_with_a_file_named_only_that_one_is_written(tmp_path):
    model, _ = trained(0)
    found = diagnose(model, loss_of, batches(0))
    _writes(found, {"json": str(tmp_path / "x.json")}, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_plot_with_an_ending_of_no_picture_is_refused_before_anything_is_measured(tmp_path):
    for name in ("x.txt", "x"):
        with pytest.raises(ValueError, match=r"ends in no kind of picture: give one of .*\.png"):
            _check_files(SimpleNamespace(json=None, out=None, plot=str(tmp_path / name)))
    _check_files(SimpleNamespace(json=None, out=None, plot=str(tmp_path / "x.PNG")))
