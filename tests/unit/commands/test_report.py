"""`megatron-fp8 report --html`: one file, or one line that says what is wrong."""

import json
import sys

import pytest

from megatron_fp8.commands.main import main
from tests.support.run_folders import write_run


def test_a_page_of_several_runs(tmp_path, capsys):
    runs = [str(write_run(tmp_path / name, every=every)) for name, every in (("a", 0), ("b", 10))]
    assert main(["report", *runs, "--html", str(tmp_path / "out.html")]) == 0
    text = (tmp_path / "out.html").read_text()
    assert text.startswith("<!doctype html>") and "<title>Report: a, b</title>" in text
    assert (
        capsys.readouterr().out
        == f"{tmp_path / 'out.html'} ({len(text.encode()) / 1e6:.1f} MB): open it in a browser\n"
    )


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "give one run folder"),
        (["--html", "x.html"], "no run was given"),
        (["RUN", "RUN", "--html", "x.html"], "was given twice"),
        (["COMPARISON"], "is a comparison's folder, and no run's: give one of its runs, such as"),
        (["BROKEN", "--html", "x.html"], "line 3 of"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, said):
    places = {"RUN": write_run(tmp_path / "run", every=0), "FOLDER": tmp_path}
    places["COMPARISON"] = tmp_path / "cmp"
    (tmp_path / "cmp" / "runs" / "bf16-seed-1").mkdir(parents=True)
    places["BROKEN"] = write_run(tmp_path / "broken", every=0)
    with (places["BROKEN"] / "metrics.jsonl").open("r+") as stream:
        text = stream.readlines()
        stream.seek(0)
        stream.writelines([*text[:2], "?" + text[2], *text[3:]])
    assert main(["report", *(str(places.get(a, a)) for a in arguments)]) == 2
    out = capsys.readouterr()
    assert out.out == "" and out.err.count("\n") == 1 and said in out.err


def test_without_bokeh_it_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh", None)
    run = write_run(tmp_path / "run", every=0)
    assert main(["report", str(run), "--html", str(tmp_path / "x.html")]) == 2
    assert "pip install 'bokeh" in capsys.readouterr().err


def test_the_first_skipped_step_has_its_reason(tmp_path, capsys):
    run = write_run(tmp_path / "run", every=0)
    events = [(20, "save", "iter_20"), (41, "skip", "the weight x holds 1 NaN"), (50, "skip", "another")]
    lines = [json.dumps({"iteration": i, "event": event, "text": text}) for i, event, text in events]
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["report", str(run)]) == 0
    assert "\nskipped     first in iteration 41: the weight x holds 1 NaN\n" in capsys.readouterr().out


def test_escapes_in_a_report_do_not_reach_the_terminal(tmp_path, capsys, monkeypatch):
    run = write_run(tmp_path / "run", every=0)
    monkeypatch.setattr("megatron_fp8.train.report.format_report", lambda _: "a site\x1b]0;mine\x07\n  b")
    assert main(["report", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("a site\\x1b]0;mine\\x07\n  b\n")


def test_advice_does_not_take_the_place_of_another_file(tmp_path, capsys):
    run = write_run(tmp_path / "run", every=0)
    before = (run / "report.json").read_bytes()
    assert main(["report", str(run), "--advice", str(run / "report.json")]) == 2
    assert "is not replaced" in capsys.readouterr().err and (run / "report.json").read_bytes() == before
