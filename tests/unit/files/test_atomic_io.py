"""Files that are whole or not there, whatever stands under their names."""

import os
import subprocess
import sys
import threading
import time

import pytest

from megatron_fp8.files.atomic_io import discard, files_not_visible, free_name, replace_file


def test_a_replaced_file_is_never_half_written(tmp_path):
    path = tmp_path / "latest"
    replace_file(path, "one\n")
    replace_file(path, "two\n")
    assert path.read_text() == "two\n" and os.listdir(tmp_path) == ["latest"]


def test_a_pipe_or_device_is_not_replaced_and_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no ordinary file"):
        replace_file(tmp_path / "pipe", "x")
    monkeypatch.setattr(os, "fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replace_file(tmp_path / "new", "x")
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_link_is_replaced_and_what_it_points_to_is_left(tmp_path):
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "latest").symlink_to(other)
    (tmp_path / ".latest.new").symlink_to(other)
    replace_file(tmp_path / "latest", "one\n")
    assert other.read_text() == "mine" and (tmp_path / "latest").read_text() == "one\n"
    assert not (tmp_path / "latest").is_symlink()


def test_the_process_s_own_output_is_written_to_and_stays(tmp_path):
    """`--json /dev/stdout > log` as root would else make /dev/stdout an ordinary file, for the whole machine."""
    link, log = tmp_path / "stdout", tmp_path / "log"
    link.symlink_to("/proc/self/fd/1")
    program = (
        "import sys, pathlib; from megatron_fp8.files.atomic_io import write_result; print('before', flush=True);"
        "write_result(pathlib.Path(sys.argv[1]), 'a result\\n'); print('after')"
    )
    with log.open("w") as stream:
        subprocess.run([sys.executable, "-c", program, str(link)], stdout=stream, check=True)
    assert log.read_text().split() == ["before", "a", "result", "after"]
    assert link.is_symlink()


def test_whatever_has_a_name_is_removed(tmp_path):
    kept = tmp_path / "kept"
    (kept / "in it").mkdir(parents=True)
    (tmp_path / "folder" / "in it").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(kept)
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("folder", "file", "link", "dangling", "nothing"):
        discard(tmp_path / name)
    assert os.listdir(tmp_path) == ["kept"] and (kept / "in it").is_dir()


def test_a_free_name_follows_all_that_are_taken(tmp_path):
    assert free_name(tmp_path / "previous") == tmp_path / "previous-1"
    for name in ("previous-2", "previous-old", "previous-10"):
        (tmp_path / name).mkdir()
    assert free_name(tmp_path / "previous") == tmp_path / "previous-11"


def test_files_that_come_late_are_waited_for(tmp_path):
    (tmp_path / "there").write_text("abc")
    (tmp_path / "growing").write_text("a")

    def write_later():
        time.sleep(0.2)
        (tmp_path / "late").write_text("abc")
        (tmp_path / "growing").write_text("abc")

    late = threading.Thread(target=write_later)
    late.start()
    assert files_not_visible(tmp_path, {"there": 3, "late": 3, "growing": 3}, patience=200) == []
    late.join()
    assert files_not_visible(tmp_path, {"there": 4, "late": 3, "never": 1}, patience=0.1) == [
        "there",
        "never",
    ]
    assert files_not_visible(tmp_path / "no folder", {"never": 1}, patience=0.1) == ["never"]
