"""Runs as their folders tell them: names that differ, and folders that are no run's."""

import json

import pytest

from megatron_fp8.report.run import read_run, read_runs
from tests.support.run_folders import sites, write_run


def test_a_run_is_read_whole(tmp_path):
    run = read_run(write_run(tmp_path / "run", layers=2, iterations=40))
    assert (run.name, run.last) == ("run", 40) and {"lm_loss", "validation_loss"} <= set(run.curves)
    assert run.phases[0] == ("warm-up", "BF16", 1, 5)
    assert run.statistics is not None and run.statistics.sites == tuple(sites(2))
    assert run.events == ()
    (advice,) = run.advice
    assert advice.paste == ("--model.fp8=e4m3",) and [name for name, _ in advice.details] == ["cause"]


def test_names_are_the_shortest_ends_that_differ(tmp_path):
    folders = [write_run(tmp_path / a / b, every=0) for a, b in (("x", "run"), ("y", "run"), ("y", "other"))]
    assert [run.name for run in read_runs(folders)] == ["x/run", "y/run", "y/other"]
    assert [run.name for run in read_runs(folders[1:])] == ["run", "other"]
    with pytest.raises(ValueError, match="was given twice"):
        read_runs([folders[0], folders[0] / ".." / "run"])
    with pytest.raises(ValueError, match="no run was given"):
        read_runs([])


def test_telemetry_alone_is_a_run(tmp_path):
    line = {"iteration": 7, "site": "0", "tensor": "input", "cur_amax": 1.0}
    (tmp_path / "telemetry.jsonl").write_text(json.dumps(line) + "\n")
    run = read_run(tmp_path)
    assert run.last == 7 and run.sites == [] and run.curves == {}


@pytest.mark.parametrize(
    "file, text, said",
    [
        ("report.json", "{", "is not a report"),
        ("report.json", "[]", "no run's report"),
        ("validation.jsonl", '{"iteration": 1, "validation_loss": "low"}\n', "line 1 of"),
        ("advice.json", "{", "is no JSON"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, file, text, said):
    folder = write_run(tmp_path / "run", every=0)
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        read_run(folder)
    assert file in str(error.value)


def test_folders_that_are_no_runs(tmp_path):
    with pytest.raises(ValueError, match="is not a run's folder"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        read_run(tmp_path / "none")
