"""What `megatron-fp8 diagnose` writes for people and for `--model.fp8_overrides`."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megatron_fp8 import diagnose
from megatron_fp8.commands.diagnose import _check_files, _files, _write_all
from megatron_fp8.diagnosis.diagnosis import Diagnosis
from megatron_fp8.diagnosis.output import format_table, overrides_text
from megatron_fp8.plan.overrides import check_overrides
from tests.support.model_faults import batches, loss_of, trained, wrong_scale


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    """Of a model with a fault in one GEMM."""
    model, _ = trained(0, blocks=1)
    with wrong_scale(model, "blocks.0.fc2", "dgrad", 2.0):
        return diagnose(model, loss_of, batches(0))


def test_overrides_and_table_of_a_site_that_stands_out(found):
    text = overrides_text({"*.qkv": "mxfp8", **found.overrides}, found.remedy)
    loaded = yaml.safe_load(text)
    assert loaded == {"*.qkv": "mxfp8", "blocks.0.fc2:dgrad": "bf16"}, "the run's own come first"
    assert list(loaded) == ["*.qkv", "blocks.0.fc2:dgrad"]
    check_overrides(loaded, "fp8_overrides")
    assert text.startswith("# ") and "100% of that" in text
    lines = format_table(found.ranking).splitlines()
    assert lines[2].startswith("| blocks.0.fc2:dgrad ") and "times that of rounding alone" in lines[2]
    assert len(lines) == 2 + len(found.ranking)
    assert format_table(found.ranking * 5).endswith(
        f"... and {5 * len(found.ranking) - 24} more, in the figures"
    )


def _writes(found, options, folder):
    run = SimpleNamespace(model=SimpleNamespace(fp8_overrides={}))
    replayed: Any = SimpleNamespace(run=run, folder=folder, iteration=1)
    files = _files(SimpleNamespace(**{"json": None, "out": None, "plot": None, **options}), folder)
    _write_all(files, replayed, found, {})


def test_files_of_an_earlier_diagnosis_are_removed_where_the_new_one_has_none(found, tmp_path, capsys):
    _writes(found, {}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"diagnosis.json", "diagnosis.png", "overrides.yaml"}
    assert (tmp_path / "diagnosis.png").stat().st_size > 5000
    _writes(replace(found, overrides={}), {}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"diagnosis.json", "diagnosis.png"}
    _writes(replace(found, overrides={}, ranking=[]), {}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"diagnosis.json"}
    printed = capsys.readouterr().out
    assert f"removed     {tmp_path / 'overrides.yaml'} of an earlier diagnosis" in printed
    assert f"removed     {tmp_path / 'diagnosis.png'} of an earlier diagnosis" in printed


def test_standard_output_is_not_removed(found, tmp_path):
    """With `> log` /dev/stdout is a link to an ordinary file."""
    link = tmp_path / "stdout"
    link.symlink_to("/proc/self/fd/1")
    with (tmp_path / "log").open("w") as log, _standard_output(log):
        _writes(replace(found, overrides={}), {"out": str(link)}, tmp_path)
    assert link.is_symlink()


@contextlib.contextmanager
def _standard_output(stream):
    before = os.dup(1)
    os.dup2(stream.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)


def test_two_results_in_one_file_are_refused_before_anything_is_measured(tmp_path):
    one = str(tmp_path / "one.png")
    with pytest.raises(ValueError, match="--json and --out and --plot name the same file"):
        _check_files(SimpleNamespace(json=one, out=None, plot=one))
    _check_files(SimpleNamespace(json="/dev/stdout", out="/dev/stdout", plot=one))


def test_with_a_file_named_only_that_one_is_written(found, tmp_path):
    _writes(found, {"json": str(tmp_path / "x.json")}, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_plot_with_an_ending_of_no_picture_is_refused_before_anything_is_measured(tmp_path):
    for name in ("x.txt", "x"):
        with pytest.raises(ValueError, match=r"ends in no kind of picture: give one of .*\.png"):
            _check_files(SimpleNamespace(json=None, out=None, plot=str(tmp_path / name)))
    _check_files(SimpleNamespace(json=None, out=None, plot=str(tmp_path / "x.PNG")))
