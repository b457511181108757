"""What benchmarks write beside their figures: of which version and commit they are."""

import json
import re
import subprocess

import pytest

from benchmarks import common
from benchmarks.support import commit
from megatron_fp8 import __version__


def git(folder, *words):
    named = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    command = ["git", "-C", str(folder), *named, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_checkouts_commit_and_whether_files_were_changed(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "ham").write_text("1")
    git(tmp_path, "add", "ham")
    git(tmp_path, "commit", "-q", "-m", "ham")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    short = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert commit.commit(tmp_path) == short
    (tmp_path / "ham").write_text("2")
    assert commit.commit(tmp_path) == f"{short}-dirty"
    (tmp_path / "unpacked").mkdir()  # a release inside somebody's repository
    assert commit.commit(tmp_path / "unpacked") is None


@pytest.mark.parametrize("git", ["#!/bin/sh\nexit 128\n", ""])
def test_without_git_there_is_none(tmp_path, monkeypatch, git):
    (tmp_path / ".git").mkdir()
    if git:
        (tmp_path / "git").write_text(git)
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit.commit(tmp_path) is None


@pytest.mark.parametrize("found", ["abc1234", None])
def test_a_record_has_this_packages_version_and_commit(tmp_path, monkeypatch, found):
    monkeypatch.setattr(common, "commit", lambda: found)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    record = {**common.environment(["megatron-core"]), "measured": "medians"}
    assert list(record["versions"]) == ["megatron_fp8", "torch", "megatron-core"]
    common.write_results("ham", "Ham", "python ham.py", record, "1", [1])
    kept = json.loads((tmp_path / "ham.json").read_text())["environment"]
    assert (kept["versions"]["megatron_fp8"], kept["commit"]) == (__version__, found)
    page = (tmp_path / "ham.md").read_text()
    assert f"megatron_fp8 {__version__}, torch " in page
    assert re.findall(r", commit (\S+), ", page) == ([found] if found else [])
