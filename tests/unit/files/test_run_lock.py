"""One run at a time in a folder: who holds it, who may take it over, and who is told."""

import errno
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
ELSEWHERE = "another-node"


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(run_lock, "_SETTLE_S", 0.05)


def rename_owner(path: Path, **fields: str) -> None:
    """Edit fields of a lock in place: its owner renews it still."""
    lines = [line.partition("=") for line in path.read_text().splitlines()]
    with path.open("r+") as stream:
        stream.writelines(f"{name}{sign}{fields.get(name, value)}\n" for name, sign, value in lines)
        stream.truncate()


@pytest.fixture
def lock(tmp_path):
    """A function that takes a lock of the folder, released at the end; `lock.said` is what it said."""
    taken = []

    def take(environ=None, *, elsewhere=False, renewed=True, stale=0.4):
        made = RunLock(tmp_path, "run_dir", environ=environ or {}, stale=stale)
        made.take(take.said.append)
        if elsewhere:
            rename_owner(made.path, host=ELSEWHERE, machine=ELSEWHERE)
        if not renewed:
            made._lease._stop_heartbeat()
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
    assert f"run_dir={str(tmp_path)!r} is in use by another run: process {os.getpid()} on {ELSEWHERE}" in said
    assert f"delete {str(tmp_path / LOCK)!r}" in said
    first.check()
    first.release()
    assert not os.listdir(tmp_path)
    lock().check()


@pytest.mark.parametrize("environ", [{}, {"TORCHELASTIC_RUN_ID": "my_run"}])
def test_a_living_process_of_this_machine_is_not_taken_for_a_dead_one(lock, environ):
    """Nor where a script with a fixed --rdzv-id is started twice."""
    lock(environ, renewed=False)
    with pytest.raises(LockHeld):
        lock(environ, stale=0.4)


def test_a_dead_process_is_taken_over_at_once_and_named(tmp_path, lock, monkeypatch):
    """The process is killed, and does not clean up. NFS has no rename that exchanges two files."""
    code = (
        "import os, sys; from pathlib import Path; from megatron_fp8.files.run_lock import RunLock;"
        "held = RunLock(Path(sys.argv[1]), 'run_dir', stale=1e6); held.take(print); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == 9
    left = (tmp_path / LOCK).read_bytes()
    taken = lock(stale=1e6)
    taken.check()
    taken.release()
    monkeypatch.setattr("filelock._soft._exclusive._recovery.exchange_names", lambda *_: False)
    (tmp_path / LOCK).write_bytes(left)
    lock(stale=1e6).check()
    assert len(lock.said) == 2 and all(said.endswith("its process has ended") for said in lock.said)


@pytest.mark.parametrize("environ", [SLURM, {"TORCHELASTIC_RUN_ID": "my_run"}])
def test_the_same_job_takes_it_over_and_who_was_taken_for_dead_is_told(lock, environ):
    first = lock(environ, elsewhere=True)
    second = lock({**environ, "SLURM_RESTART_COUNT": "1"})
    assert lock.said[-1].endswith("it is of this very job")
    second.check()
    with pytest.raises(OSError, match="another run has taken over"):
        first.check()
    first.release()
    second.check()


def test_other_jobs_do_not(lock):
    lock(SLURM, elsewhere=True)
    for environ in ({**SLURM, "SLURM_JOB_ID": "78"}, {**SLURM, "SLURM_CLUSTER_NAME": "d"}):
        with pytest.raises(LockHeld):
            lock(environ)


@pytest.mark.parametrize("exchanges", [True, False], ids=["local", "NFS"])
def test_a_lock_that_is_not_renewed_is_taken_over(lock, monkeypatch, exchanges):
    """By no clock but the watcher's own."""
    if not exchanges:
        monkeypatch.setattr("filelock._soft._exclusive._recovery.exchange_names", lambda *_: False)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    first = lock(elsewhere=True, renewed=False)
    os.utime(first.path, (0, 0))
    lock().check()
    assert "waiting up to" in lock.said[0] and "it was not renewed for" in lock.said[1]
    with pytest.raises(OSError, match="another run has taken over"):
        first.check()


@pytest.mark.parametrize("content", ['{"owner": 3}' + 2036 * " ", "filelock/2\npid=x\n"])
def test_a_damaged_lock_is_a_lock_that_may_be_stale(tmp_path, lock, content):
    """So is one of an earlier version, in JSON."""
    (tmp_path / LOCK).write_text(content)
    lock(stale=0.1).check()
    assert "did not leave its name" in lock.said[-1]


def test_a_lock_that_is_let_go_while_it_is_watched_is_taken(lock):
    first = lock(elsewhere=True, renewed=False, stale=30)
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


def test_folders_made_for_nothing_are_removed(tmp_path):
    made = RunLock(tmp_path / "a" / "b", "run_dir", environ={})
    made.take(print)
    made.release()
    assert not os.listdir(tmp_path)
    made.take(print)
    (tmp_path / "a" / "b" / "something").write_text("")
    made.release()
    assert os.listdir(tmp_path / "a" / "b") == ["something"]


def test_a_folder_in_its_place_is_an_error(tmp_path, lock):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        lock()


def test_jobs_have_names():
    assert job_name({}) == ""
    assert job_name(SLURM) == "SLURM job 77 of c"
    assert job_name({"TORCHELASTIC_RUN_ID": "my_run"}) == "torchrun my_run"
    assert str(os.getppid()) in job_name({"TORCHELASTIC_RUN_ID": "none"})


def test_it_is_renewed_again_after_the_file_system_failed_for_long(lock, monkeypatch):
    """filelock's thread gives up then, and another run would take the lock over."""

    def fails(*_, **__):
        raise OSError(errno.EIO, "no answer")

    taken = lock(stale=0.6)
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="could not be renewed"):
        patch.setattr("filelock._soft._lease.touch", fails)
        deadline = time.monotonic() + 30
        while taken._lease.compromise is None and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.1)
    before = taken.path.stat().st_mtime_ns
    time.sleep(0.3)
    assert taken.path.stat().st_mtime_ns > before
    taken.check()
    rename_owner(taken.path, token="another")  # and left alone where it is another's
    time.sleep(0.3)
    before = taken.path.stat().st_mtime_ns
    time.sleep(0.3)
    assert taken.path.stat().st_mtime_ns == before


def test_a_job_of_a_very_long_name(tmp_path):
    """filelock reads no more of a lock than this."""
    names = ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME")
    held = RunLock(tmp_path, "run_dir", environ=dict.fromkeys(names, "\u6f22\n" * 5000))
    held.take(print)
    assert held.path.stat().st_size < 1024 - 253
    held.check()
    held.release()
    assert not held.path.exists()


def test_it_stays_where_it_was_when_the_program_goes_elsewhere(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    lock = RunLock(Path("run"), "run_dir")
    lock.take(lambda _: None)
    monkeypatch.chdir(tmp_path / "there")
    lock.check()
    assert not (tmp_path / "there" / "run" / LOCK).exists() and (tmp_path / "here" / "run" / LOCK).exists()
    lock.release()
    assert not (tmp_path / "here" / "run" / LOCK).exists()
