"""Ranks' files are shown as they grow, errors last and once, and a dead rank's last line is found."""

from __future__ import annotations

import os

import pytest

from megatron_fp8.train.launch import rank_logs
from megatron_fp8.train.launch.rank_logs import RankLogs


@pytest.fixture
def logs(tmp_path):
    return RankLogs(tmp_path, terminal=False)


def begin(logs, ranks=(0, 1)):
    """The files of an attempt, opened as torch opens them: {(rank, stream): file}."""
    envs = {local: {"RANK": str(rank)} for local, rank in enumerate(ranks)}
    dest = logs.reify(envs)
    assert [envs[local]["TORCHELASTIC_ERROR_FILE"] for local in envs] == list(dest.error_files.values())
    files = {}
    for local, rank in enumerate(ranks):
        for stream, paths in (("stdout", dest.stdouts), ("stderr", dest.stderrs)):
            if paths[local]:
                files[rank, stream] = open(paths[local], "wb", buffering=0)  # noqa: SIM115
    return files


def test_whole_lines_are_shown_and_the_rest_at_the_end(logs, capsys):
    files = begin(logs)
    files[0, "stdout"].write(b"one\ntw")
    files[1, "stderr"].write(b"caf\xc3\xa9 \xff\n")
    logs.show()
    assert capsys.readouterr() == ("one\n", "café �\n")
    files[0, "stdout"].write(b"o")
    logs.show()
    assert capsys.readouterr() == ("", "")
    logs.show(ended=True)
    assert capsys.readouterr() == ("two\n", "")


def test_a_line_that_is_drawn_anew_is_shown_each_time(logs, capsys):
    files = begin(logs)
    files[0, "stdout"].write(b"10 %\r20 %\r30")
    logs.show()
    assert capsys.readouterr().out == "10 %\r20 %\r"


def test_errors_are_held_and_taken_once(logs, capsys):
    files = begin(logs)
    for rank in (0, 1):
        files[rank, "stderr"].write(b"before\nerror: bad\n")
    logs.show()
    assert capsys.readouterr().err == "before\nbefore\n"
    assert logs.errors() == ["error: bad"] and logs.errors() == []
    files[1, "stderr"].write(b"error: bad\n")
    logs.show()
    assert logs.errors() == []


def test_an_error_that_ends_nobody_is_shown_after_a_while(logs, capsys, monkeypatch):
    files = begin(logs)
    files[0, "stderr"].write(b"error: the disk is full\n")
    logs.show()
    monkeypatch.setattr(rank_logs, "_HELD_S", -1.0)
    logs.show()
    logs.show()
    assert capsys.readouterr().err == "error: the disk is full\n" and logs.errors() == [] and logs.said_errors


def test_each_attempt_has_files_of_its_own(logs, tmp_path, capsys):
    begin(logs)[0, "stdout"].write(b"first\n")
    begin(logs)[0, "stdout"].write(b"second\n")
    assert capsys.readouterr().out == "first\n"
    other = RankLogs(tmp_path, terminal=False)  # of another launch, or another node, in the same folder
    begin(other, ranks=(0, 1))
    begin(RankLogs(tmp_path, terminal=False), ranks=(2, 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt0", "attempt1", "attempt2"]
    assert (tmp_path / "attempt0" / "rank0.stdout.log").read_text() == "first\n"
    assert (tmp_path / "attempt0" / "rank3.stderr.log").exists()


def test_the_last_line_is_what_was_said_last_and_stderr_s_within_a_second(logs):
    files = begin(logs)
    assert logs.last_line(0)[0] == ""
    files[0, "stderr"].write(b"a warning\n\n")
    files[0, "stdout"].write(b"x" * 5000 + b"\niteration 5\n")
    said, path = logs.last_line(0)
    assert said == "a warning" and path.name == "rank0.stderr.log"
    os.utime(path, (1, 1))
    said, path = logs.last_line(0)
    assert said == "iteration 5" and path.name == "rank0.stdout.log"


def test_on_a_terminal_the_first_rank_writes_to_it(tmp_path):
    logs = RankLogs(tmp_path, terminal=True)
    files = begin(logs)
    assert (0, "stdout") not in files and (1, "stdout") in files
    files[0, "stderr"].write(b"said\n")
    assert logs.last_line(0)[0] == "said"
