"""The record of a run: one reader for reports, pages, advice and comparisons, which refuses what it cannot understand."""

import json
import math

import pytest

from megatron_fp8.commands.main import main
from megatron_fp8.train.run_record import later_training_note, record_of
from tests.support.run_folders import write_run


def changed(folder, file, number, change):
    """One line of a file, counted from 1, with some fields changed, or as the text that is given."""
    lines = (folder / file).read_text().splitlines(keepends=True)
    given = isinstance(change, str)
    lines[number - 1] = change + "\n" if given else json.dumps(json.loads(lines[number - 1]) | change) + "\n"
    (folder / file).write_text("".join(lines))


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("telemetry.jsonl", {"iteration": -7}, "iteration -7"),
        ("telemetry.jsonl", {"site": 3}, "site 3"),
        ("telemetry.jsonl", {"tensor": "wieght"}, "tensor 'wieght', and that is one of input, weight"),
        ("telemetry.jsonl", {"underflows%": "x0.0"}, "underflows% 'x0.0'"),
        ("telemetry.jsonl", {"partial": "yes"}, "partial 'yes'"),
        ("telemetry.jsonl", '{"iteration": 10, "si', "is no JSON"),
        ("metrics.jsonl", '{"iteration": 2, "lm_lsos": 3.0, "skipped": 0}', "has no lm_loss"),
        ("metrics.jsonl", {"lm_loss": "low"}, "lm_loss 'low'"),
        ("metrics.jsonl", {"skipped": "no"}, "skipped 'no'"),
    ],
)
def test_a_line_is_refused_with_its_number(tmp_path, file, change, said):
    run = write_run(tmp_path / "run")
    changed(run, file, 2, change)
    record = record_of(run)
    with pytest.raises(ValueError) as refused:
        list(record.metrics() if file == "metrics.jsonl" else record.telemetry())
    assert f"line 2 of '{run / file}'" in str(refused.value) and said in str(refused.value)


def test_every_reader_refuses_such_a_line(tmp_path, capsys):
    file = "metrics.jsonl"
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other")
    for folder in (run, other):
        (folder / "config.yaml").write_text("train: {seed: 1}\n")
    changed(run, file, 2, {"iteration": 0})
    for arguments in (
        ["report", run],
        ["report", run, "--html", tmp_path / "page.html"],
        ["report", run, "--advice", tmp_path / "advice.json"],
        ["diagnose", other, "--against", run],
    ):
        assert main([str(argument) for argument in arguments]) == 2, arguments
        out = capsys.readouterr()
        assert f"line 2 of '{run / file}'" in out.err, arguments
        assert out.out == "" and out.err.count("\n") == 1
    assert not (tmp_path / "page.html").exists() and not (tmp_path / "advice.json").exists()


def test_events_are_checked_and_words_are_numbers(tmp_path):
    run = write_run(tmp_path / "run")
    changed(run, "telemetry.jsonl", 1, {"tensor": "input.wgrad", "std": "NaN", "mean": None})
    changed(run, "metrics.jsonl", 1, {"lm_loss": "Infinity"})
    record = record_of(run)
    first = next(record.telemetry()).content
    assert math.isnan(first["std"]) and first["mean"] is None and first["tensor"] == "input.wgrad"
    assert record.metrics()[0].content["lm_loss"] == math.inf
    assert main(["report", str(run)]) == 0
    (run / "events.jsonl").write_text(
        '{"iteration": 0, "event": "save", "text": "t"}\n{"iteration": 1, "evnet": "x"}\n'
    )
    with pytest.raises(ValueError, match=r"line 2 of .*event None"):
        record.events()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": None}, "device is 'None', and that is a text"),
        ({"parallel": {"world_size": 1}}, "has no parallel.launcher"),
        ({"sites": ["a"]}, "sites[1] is 'a', and that is an object"),
        ({"sites": [{"name": "a", "precision": "fp8", "recipe": None, "roles": 3}]}, "an object or null"),
        ({"sites": [{"name": "a", "precision": "fp8", "recipe": None, "layer": True}]}, "sites[1].layer is"),
        ({"sites": [{"name": "a", "precision": "fp8"}]}, "has no sites[1].recipe"),
        ({"fp8_param": {"weights": 1}}, "has no precision.fp8_param.bytes"),
    ],
)
def test_a_report_that_lacks_something_is_refused(tmp_path, change, said):
    run = write_run(tmp_path / "run")
    path = run / "report.json"
    report = json.loads(path.read_text())
    for name in ("phases", "fp8_param"):
        if name in change:
            report["precision"][name] = change.pop(name)
    path.write_text(json.dumps(report | change))
    with pytest.raises(ValueError) as refused:
        record_of(run).report()
    assert f"{str(path)!r} is no run's report: " in str(refused.value) and said in str(refused.value)


def test_an_unfinished_last_line_is_left_out_and_said(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    with (run / "telemetry.jsonl").open("a") as stream:
        stream.write('{"iteration": 50, "site": "dec')
    for more in ([], ["--html", tmp_path / "page.html"], ["--advice", tmp_path / "advice.json"]):
        assert main(["report", str(run), *map(str, more)]) == 0
        said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note ")]
        assert len(said) == 1 and "telemetry.jsonl" in said[0] and "unfinished" in said[0], more


def test_losses_that_are_missing_are_no_comparison(tmp_path, capsys):
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other")
    for folder in (run, other):
        (folder / "config.yaml").write_text("train: {seed: 1}\n")
    assert main(["diagnose", str(run), "--against", str(other)]) == 0
    assert "loss        the same in 40 iterations" in capsys.readouterr().out
    (other / "metrics.jsonl").unlink()
    assert main(["diagnose", str(run), "--against", str(other)]) == 2
    out = capsys.readouterr()
    assert f"'{other}' has no losses to compare" in out.err and out.out == "" and out.err.count("\n") == 1


def test_a_run_that_trained_on_after_its_newest_checkpoint_says_so(tmp_path):
    run, saves = tmp_path / "run", tmp_path / "run" / "checkpoints"
    for iteration in (2, 4):
        (saves / f"iter_{iteration:07d}").mkdir(parents=True)
    older, newest = sorted(saves.iterdir())
    assert later_training_note(run, newest) == [], "no record is there"
    metrics = run / "metrics.jsonl"
    metrics.write_text("".join(f'{{"iteration": {n}, "lm_loss": 1.0}}\n' for n in range(1, 5)))
    assert later_training_note(run, newest) == []
    with metrics.open("a") as stream:
        stream.write('{"iteration": 6, "lm_loss": 1.0}\n')
    said = "the run trained to iteration 6, and its newest checkpoint is of iteration 4"
    for path in (run, saves, newest):
        assert later_training_note(path, newest)[0].startswith(said), path
    assert later_training_note(older, older) == [], "it was chosen"
    elsewhere = tmp_path / "elsewhere" / newest.name
    elsewhere.mkdir(parents=True)
    assert later_training_note(elsewhere.parent, elsewhere) == [], "whose records are not known"
    with metrics.open("a") as stream:
        stream.write("{}\n")
    assert "is not known: line 6 of " in later_training_note(run, newest)[0]
