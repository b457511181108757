"""Tests in several forked processes: each runs once, whole files together, and what dies or hangs is one failed test."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.command import run

CONFTEST = """\
import json, os, pathlib, time
import pytest
from tests.support import time_limits, workers

time_limits.LOOK_S = 0.1
HERE = pathlib.Path(__file__).parent

def pytest_configure(config):
    config.pluginmanager.register(time_limits.TimeLimits())
    (HERE / "ran.jsonl").touch()

def pytest_runtestloop(session):
    workers.run(session, 2)
    return True

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    with (HERE / "ran.jsonl").open("a") as file:
        print(json.dumps([item.nodeid, os.getpid()]), file=file)
    yield

@pytest.fixture(scope="session", autouse=True)
def each_process():
    yield
    (HERE / f"torn-down-{os.getpid()}").touch()

def until_tests_run_in(processes):
    until = time.monotonic() + 200
    while len({line.split(",")[1] for line in (HERE / "ran.jsonl").open()}) < processes:
        assert time.monotonic() < until
        time.sleep(0.01)

@pytest.fixture(scope="module")
def other_started():
    until_tests_run_in(2)

@pytest.fixture(scope="module")
def others_started():
    until_tests_run_in(3)
"""
FILES = {
    "test_a.py": """\
import os, time, warnings
import pytest
def test_first(tmp_path): warnings.warn("of test_a", RuntimeWarning)
def test_waits(other_started): pass
def test_fails(): print("said before"); assert 1 == 2, "what failed"
def test_dies(): os._exit(3)
def test_goes_on(): pass
@pytest.mark.timeout(2)
def test_hangs(): print("before it hangs"); time.sleep(3600)
def test_goes_on_again(): pass
""",
    "test_b.py": """\
import pytest
def test_first(): pass
def test_waits(other_started): pass
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
@pytest.fixture
def breaks():
    yield
    raise OSError("taken down")
def test_last(breaks): pass
""",
    "test_c.py": "def test_only(): pass\n",
    "test_d.py": """\
import pytest
pytestmark = pytest.mark.waits
def test_waits(others_started): pass
""",
    "test_e.py": "import pytest\npytestmark = pytest.mark.waits\ndef test_only(): pass\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("suite")
    for name, text in {
        "conftest.py": CONFTEST,
        "pytest.ini": "[pytest]\ntimeout_method = thread\nmarkers = waits\n",
        **FILES,
    }.items():
        (path / name).write_text(text)
    return path


@pytest.fixture(scope="module")
def said(folder) -> str:
    done = run("-m", "pytest", "-ra", "-p", "no:cacheprovider", "--durations=3", cwd=folder)
    assert done.returncode == 1, done.stderr
    return done.stdout


def test_all_is_reported_once(said):
    assert (
        said.splitlines()[-1].strip("= ").startswith("3 failed, 10 passed, 1 skipped, 1 warning, 1 error in ")
    )
    assert "what failed" in said and "said before" in said and "not here" in said
    assert "RuntimeWarning: of test_a" in said and "OSError: taken down" in said
    assert re.search(r"^\d+\.\d+s setup ", said, re.M), "durations"


def test_who_dies_or_hangs_is_named(said):
    assert "FAILED test_a.py::test_dies - the process of this test ended with 3" in said
    assert "FAILED test_a.py::test_hangs - the process of this test ended with 1" in said
    assert "in test_hangs" in said, "its stack"
    assert said.count("+ Timeout +") == 2 and "Captured stdout" in said and "before it hangs" in said


def test_files_stay_whole_and_go_to_whoever_is_free(said, folder):
    ran = [json.loads(line) for line in (folder / "ran.jsonl").read_text().splitlines()]
    by_file = {name: [r for r in ran if r[0].startswith(name)] for name in FILES}
    names = [each[0].partition("::")[2] for each in by_file["test_a.py"]]
    assert names == re.findall(r"def (test_\w+)", FILES["test_a.py"]), "in their order, each once"
    processes = {name: list(dict.fromkeys(r[1] for r in rows)) for name, rows in by_file.items()}
    assert len(processes["test_a.py"]) == 3, "one more after each that ended"
    assert len(processes["test_b.py"]) == 1 and processes["test_b.py"][0] != processes["test_a.py"][0]
    ended = {int(path.name.rpartition("-")[2]) for path in folder.glob("torn-down-*")}
    assert ended == {r[1] for r in ran} - {*processes["test_a.py"][:2]}, "fixtures of a session"


def test_one_process_more_has_the_files_that_wait(said, folder):
    ran = [json.loads(line) for line in (folder / "ran.jsonl").read_text().splitlines()]
    (process,) = {pid for name, pid in ran if name.startswith(("test_d.py", "test_e.py"))}
    assert {name for name, pid in ran if pid == process} == {"test_d.py::test_waits", "test_e.py::test_only"}


def test_the_first_failure_ends_all(folder):
    done = run("-m", "pytest", "-x", "-p", "no:cacheprovider", "test_a.py", "-k", "fails or goes", cwd=folder)
    assert done.returncode == 1
    assert "1 failed" in done.stdout.splitlines()[-1] and "stopping after 1 failure" in done.stdout
