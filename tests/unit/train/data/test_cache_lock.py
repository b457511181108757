"""One process fills a folder of the cache: others wait for it, and what killed ones left is removed."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_fp8.files import run_lock
from megatron_fp8.files.run_lock import LOCK
from megatron_fp8.train.data import cache_lock, corpus
from megatron_fp8.train.data.cache_lock import cache_writer
from megatron_fp8.train.data.tokenizers import ByteTokenizer


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(run_lock, "_SETTLE_S", 0.05)
    monkeypatch.setattr(cache_lock, "_LOOK_S", 0.02)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"hello\nworld\n")
    return path


@pytest.fixture
def prepare(text, cache):
    return lambda: Path(corpus.prepare([text], ByteTokenizer(), cache)).parent


def _killed(folder, *, elsewhere=False):
    """What a process leaves that was killed while it filled `folder`."""
    code = (
        "import os, sys; from pathlib import Path; from megatron_fp8.train.data.cache_lock import cache_writer\n"
        "with cache_writer(Path(sys.argv[1]), 'data.cache_dir') as (_, unfinished):\n"
        "    (unfinished / 'corpus.bin').write_bytes(b'half')\n"
        "    os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 9
    record = json.loads((folder / LOCK).read_text())
    if elsewhere:
        record["process"]["machine"] = "another container"
        (folder / LOCK).write_text(json.dumps(record))
    assert len(list(folder.glob(".*/corpus.bin"))) == 1


def test_two_starts_with_one_number_prepare_the_same_text_once(prepare, cache, monkeypatch, capsys):
    """In two containers both are process 1: the second one waits for the first one's, and writes nothing."""
    writing, go_on, written, found = threading.Event(), threading.Event(), [], []
    usual = corpus._write

    def slow(*given):
        written.append(1)
        writing.set()
        assert go_on.wait(200)
        return usual(*given)

    monkeypatch.setattr(corpus, "_write", slow)
    threads = [threading.Thread(target=lambda: found.append(prepare())) for _ in range(2)]
    threads[0].start()
    assert writing.wait(200)
    threads[1].start()
    said = ""
    deadline = time.monotonic() + 200
    while "waiting for process" not in said and time.monotonic() < deadline:
        said += capsys.readouterr().err
        time.sleep(0.01)
    go_on.set()
    for thread in threads:
        thread.join(200)
    assert len(found) == 2 and found[0] == found[1] and written == [1]
    assert said.count(f"lock        waiting for process {os.getpid()} on ") == 1
    assert sorted(path.name for path in found[0].iterdir()) == ["corpus.bin", "corpus.idx", "corpus.json"]


def test_a_preparation_that_was_killed_is_taken_over_and_its_rest_removed(prepare, capsys, recwarn):
    folder = prepare()
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    for path in folder.iterdir():
        path.unlink()
    _killed(folder)
    assert prepare() == folder and {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert "its process has ended" in capsys.readouterr().err and not recwarn


def test_rests_of_other_texts_go_where_their_process_has_surely_ended(prepare, cache):
    here, elsewhere, old, whole, lives = (cache / (digit * 32) for digit in "12345")
    for folder in (here, whole):
        _killed(folder)
    (whole / "corpus.json").write_text("{}")  # killed between its last write and letting go
    for folder in (elsewhere, old):
        _killed(folder, elsewhere=True)
    hours_ago = time.time() - 2 * cache_lock._ABANDONED_S
    os.utime(old / LOCK, (hours_ago, hours_ago))
    with cache_writer(lives, "data.cache_dir") as (_, unfinished):
        os.utime(lives / LOCK, (hours_ago, hours_ago))  # a process that was stopped for a while
        folder = prepare()
        assert unfinished.is_dir()
    assert set(cache.iterdir()) == {elsewhere, whole, folder}
    assert len(list(elsewhere.glob(".*/corpus.bin"))) == 1
    assert os.listdir(whole) == ["corpus.json"]


def test_an_empty_run_beside_it_is_left_alone(prepare, cache):
    """Whose name looks like the cache's own: its process has ended, and it holds a lock alone."""
    run = cache / ("6" * 32)
    _killed(run)
    shutil.rmtree(next(run.glob(".[0-9a-f]*")))
    prepare()
    assert os.listdir(run) == [LOCK]


@pytest.mark.parametrize("sticky", [False, True])
def test_what_another_user_left_is_moved_or_said(prepare, cache, capsys, monkeypatch, sticky):
    folder = prepare()
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    for path in folder.iterdir():
        path.unlink()
    _killed(folder)

    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(run_lock.RunLock, "_write", refused)  # the lock is another user's
    if sticky:
        monkeypatch.setattr(Path, "rename", refused)
        with pytest.raises(
            ValueError, match=f"cannot be written .*, or have '{folder}' removed, which another"
        ):
            prepare()
        return
    assert prepare() == folder and {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert f"lock        '{folder}' was left by another user's start: moved to " in capsys.readouterr().err
    monkeypatch.undo()
    shutil.rmtree(folder)
    assert prepare() == folder and set(cache.iterdir()) == {folder}, "its owner's next start removes it"


def test_who_was_taken_for_dead_writes_nothing_more(prepare, cache, monkeypatch):
    """Its lock is another's by the time it would give its files their names."""
    usual = corpus._write

    def overtaken(files, tokenizer, prefix, *more):
        done = usual(files, tokenizer, prefix, *more)
        lock = Path(prefix).parents[1] / LOCK
        record = json.loads(lock.read_text())
        lock.write_text(json.dumps({**record, "owner": "another"}))
        return done

    with monkeypatch.context() as patched:
        patched.setattr(corpus, "_write", overtaken)
        with pytest.raises(
            ValueError, match=r"data\.cache_dir=.* cannot be written \(another run has taken over"
        ):
            prepare()
    (folder,) = cache.iterdir()
    assert os.listdir(folder) == [LOCK]


def test_nothing_else_is_removed_from_a_folder_that_is_no_cache_alone(prepare, cache):
    """`data.cache_dir=runs`: a killed run has such a lock, too."""
    run = cache / "run"
    _killed(cache / ("0" * 32))
    (cache / ("0" * 32)).rename(run)
    (run / ".git").mkdir()
    before = sorted(run.rglob("*"))
    foreign = cache / ("f" * 32)
    (foreign / ".git").mkdir(parents=True)
    (foreign / LOCK).write_bytes((run / LOCK).read_bytes())
    prepare()
    assert sorted(run.rglob("*")) == before and sorted(foreign.iterdir()) == [
        foreign / ".git",
        foreign / LOCK,
    ]
