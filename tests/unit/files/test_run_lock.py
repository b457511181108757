"""One run at a time in a folder: who holds it, who may take it over, and who is told."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_fp8.files import run_lock
from megatron_fp8.files.run_lock import LOCK, LockHeld, RunLock, job_name

SLURM = {"SLURM_JOB_ID": "77", "SLURM_CLUSTER_NAME": "c"}


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(run_lock, "_SETTLE_S", 0.05)


@pytest.fixture
def lock(tmp_path):
    """A function that takes a lock of the folder, released at the end; `lock.said` is what it said."""
    taken = []

    def take(environ=None, elsewhere=False, **times):
        made = RunLock(tmp_path, "run_dir", environ=environ or {}, **({"beat": 0.05, "stale": 0.4} | times))
        if elsewhere:
            made._record["process"] = None
            made._record["host"] = "elsewhere"
        made.take(take.said.append)
        taken.append(made)
        return made

    take.said = []
    yield take
    for made in taken:
        made.release()


def test_two_runs_do_not_share_a_folder(tmp_path, lock):
    first = lock(elsewhere=True)
    with pytest.raises(LockHeld) as refused:
        lock()
    said = str(refused.value)
    assert f"run_dir={str(tmp_path)!r} is in use by another run: process {os.getpid()} on elsewhere" in said
    assert f"delete {str(tmp_path / LOCK)!r}" in said and "since 2" in said
    first.check()
    first.release()
    assert not os.listdir(tmp_path)
    lock().check()


def test_a_living_process_of_this_machine_is_not_taken_for_a_dead_one(lock):
    lock()
    with pytest.raises(LockHeld):
        lock()


def test_a_living_run_of_a_torchrun_with_the_same_name_is_not_taken_over(lock):
    """A script with a fixed --rdzv-id that is started twice; a SLURM job's step before may still be ending."""
    named = {"TORCHELASTIC_RUN_ID": "my_run"}
    first = lock(named)
    with pytest.raises(LockHeld, match=r"in use by another run: .*torchrun my_run"):
        lock(named)
    first.check()
    first.release()
    lock(SLURM)
    lock(SLURM).check()


def test_a_dead_process_is_taken_over_at_once_and_named(tmp_path, lock):
    """The process is killed, and does not clean up."""
    code = (
        "import os, sys; from pathlib import Path; from megatron_fp8.files.run_lock import RunLock;"
        "RunLock(Path(sys.argv[1]), 'run_dir').take(print); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == 9 and (tmp_path / LOCK).exists()
    lock(stale=1e6).check()
    assert len(lock.said) == 1 and lock.said[0].endswith("its process has ended")


def test_the_number_of_a_dead_process_may_be_another_ones(tmp_path, lock):
    lock(stale=1e6)
    record = json.loads((tmp_path / LOCK).read_text())
    record["process"]["started"] = "1"
    record["owner"] = "another"
    (tmp_path / LOCK).write_text(json.dumps(record))
    lock(stale=1e6).check()
    assert lock.said[-1].endswith("its process has ended")


@pytest.mark.parametrize(
    "environ", [SLURM, {"TORCHELASTIC_RUN_ID": "my_run"}, {"TORCHELASTIC_RUN_ID": "none"}]
)
def test_the_same_job_takes_it_over_and_who_was_taken_for_dead_is_told(lock, environ):
    first = lock(environ, elsewhere=True, beat=1e6)
    second = lock({**environ, "SLURM_RESTART_COUNT": "1"}, stale=1e6)
    assert lock.said[-1].endswith("it is of this very job")
    second.check()
    with pytest.raises(OSError, match="another run has taken over"):
        first.check()
    first.release()
    second.check()


def test_other_jobs_do_not(lock):
    lock(SLURM, elsewhere=True)
    for environ in (
        {**SLURM, "SLURM_JOB_ID": "78"},
        {**SLURM, "SLURM_CLUSTER_NAME": "d"},
        {"TORCHELASTIC_RUN_ID": "x"},
    ):
        with pytest.raises(LockHeld):
            lock(environ)


def test_a_lock_that_stands_still_is_taken_over(lock):
    lock(elsewhere=True, beat=1e6)
    lock()
    assert "waiting up to" in lock.said[0] and "it was not renewed for" in lock.said[1]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"owner": 3, "process": 4, "pid": "x"}', "\0" * 4096]
)
def test_a_damaged_lock_is_a_lock_that_may_be_stale(tmp_path, lock, content):
    (tmp_path / LOCK).write_text(content)
    lock(stale=0.1).check()
    assert "did not leave its name" in lock.said[-1]


def test_no_clock_but_the_watchers_own_is_asked(tmp_path, lock, monkeypatch):
    """The holder's files are from the year 1970, and its own times from the future."""
    lock(elsewhere=True)
    os.utime(tmp_path / LOCK, (0, 0))
    monkeypatch.setattr(time, "time", lambda: 4e9)
    with pytest.raises(LockHeld):
        lock()


def test_a_lock_that_is_let_go_while_it_is_watched_is_taken(lock):
    first = lock(elsewhere=True, beat=1e6)
    threading.Timer(0.2, first.release).start()
    lock(stale=30).check()


def test_of_two_that_take_it_over_one_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_SETTLE_S", 0.5)
    (tmp_path / LOCK).write_text("")
    locks = [RunLock(tmp_path, "run_dir", environ={}, stale=0.2) for _ in range(4)]
    outcomes = []

    def take(one):
        try:
            one.take(lambda _: None)
            outcomes.append("mine")
        except LockHeld:
            outcomes.append("refused")

    threads = [threading.Thread(target=take, args=(one,)) for one in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["mine", "refused", "refused", "refused"]
    for one in locks:
        one.release()


def test_a_deleted_lock_is_made_again_while_the_run_lives(tmp_path, lock):
    first = lock()
    (tmp_path / LOCK).unlink()
    first.check()
    with pytest.raises(LockHeld):
        lock()


def test_folders_made_for_nothing_are_removed(tmp_path):
    made = RunLock(tmp_path / "a" / "b", "run_dir", environ={})
    made.take(print)
    made.release()
    assert not os.listdir(tmp_path)
    made = RunLock(tmp_path / "a" / "b", "run_dir", environ={})
    made.take(print)
    (tmp_path / "a" / "b" / "something").write_text("")
    made.release()
    assert os.listdir(tmp_path / "a" / "b") == ["something"]


OBSTACLES = {
    "a folder": os.mkdir,
    "a link to nothing": lambda path: os.symlink("nowhere", path),
    "a link to itself": lambda path: os.symlink(path, path),
}


@pytest.mark.parametrize("make", OBSTACLES.values(), ids=OBSTACLES)
def test_what_is_no_file_is_an_error(tmp_path, lock, make):
    make(tmp_path / LOCK)
    with pytest.raises(OSError, match=LOCK):
        lock()


def test_jobs_have_names():
    assert job_name({}) == ""
    assert job_name(SLURM) == "SLURM job 77 of c"
    assert job_name({"TORCHELASTIC_RUN_ID": "my_run"}) == "torchrun my_run"
    assert str(os.getppid()) in job_name({"TORCHELASTIC_RUN_ID": "none"})


@pytest.mark.parametrize("name", ["x" * 5000, "\u6f22" * 5000])
@pytest.mark.parametrize("said", [("TORCHELASTIC_RUN_ID",), ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME")])
def test_a_job_of_a_very_long_name(tmp_path, said, name):
    """A lock has room for it: one that is longer than a lock can be was never removed."""
    held = RunLock(tmp_path, "run_dir", environ=dict.fromkeys(said, name))
    held.take(print)
    assert (tmp_path / LOCK).stat().st_size == 2048
    held.release()
    assert not (tmp_path / LOCK).exists()


def test_it_stays_where_it_was_when_the_program_goes_elsewhere(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    lock = RunLock(Path("run"), "run_dir", beat=0.01)
    lock.take(lambda _: None)
    monkeypatch.chdir(tmp_path / "there")
    lock.check()
    assert not (tmp_path / "there" / "run" / LOCK).exists() and (tmp_path / "here" / "run" / LOCK).exists()
    lock.release()
    assert not (tmp_path / "here" / "run" / LOCK).exists()


def test_a_folder_that_its_owner_takes_away_just_then_is_made_again(tmp_path, monkeypatch):
    """It lets go between our look at the folder and our lock."""
    usual, times = run_lock._make, []

    def made_and_gone(folder):
        made = usual(folder)
        times.append(folder)
        if len(times) < 3:
            folder.rmdir()
        return made

    monkeypatch.setattr(run_lock, "_make", made_and_gone)
    held = RunLock(tmp_path / "shared", "run_dir", environ={})
    held.take(print)
    held.check()
    held.release()
    times.clear()
    monkeypatch.setattr(run_lock, "_make", lambda folder: [])
    with pytest.raises(FileNotFoundError):
        RunLock(tmp_path / "never", "run_dir", environ={}).take(print)
