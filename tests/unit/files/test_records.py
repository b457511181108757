"""Records through full disks: every byte in its place, and a warning once."""

import errno
import json
import os
import warnings

import pytest

from megatron_fp8.files import records
from megatron_fp8.files.records import Appended, Board, continued, say_lacking


@pytest.fixture
def disk(monkeypatch):
    """`disk.room`: bytes that can still be written; a write of more is cut short, as the last one on a full disk is."""
    write = os.write

    class Disk:
        room = 10**9

    def limited(file, data):
        if not Disk.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, data[: Disk.room])
        Disk.room -= written
        return written

    monkeypatch.setattr(records.os, "write", limited)
    return Disk


def test_what_a_full_disk_holds_back_is_written_when_there_is_room(tmp_path, disk):
    path = tmp_path / "metrics.jsonl"
    file = Appended(path)
    wanted = [f'{{"iteration": {n}}}\n'.encode() for n in range(40)]
    with pytest.warns(UserWarning) as warned:
        for number, record in enumerate(wanted):
            disk.room = {3: 7, 20: 10**9, 30: 1, 35: 100}.get(number, disk.room)
            file.write(record)
        disk.room = 10**9
        file.close()
    assert path.read_bytes() == b"".join(wanted)
    assert len(warned) == 1 and "metrics.jsonl' cannot be written (No space left on device)" in str(
        warned[0].message
    )


def test_what_never_fits_is_said(tmp_path, disk):
    file = Appended(tmp_path / "metrics.jsonl")
    disk.room = 3
    with pytest.warns(UserWarning) as warned:
        file.write(b"0123456789")
        lacking = [*file.close(), *file.close()]
        say_lacking([])
        say_lacking([*lacking, "another"])
    assert lacking == [f"{str(tmp_path / 'metrics.jsonl')!r} lacks its last 7 bytes"]
    assert len(warned) == 2
    assert str(warned[-1].message).startswith(f"records are lost: {lacking[0]}, another.")


def test_tensorboard_reads_what_was_written(tmp_path, disk):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = Board(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, 6):
            disk.room = 5 if step == 2 else 10**9 if step == 4 else disk.room
            first.scalars(step, {"train/lm_loss": step / 2, "train/tokens": step * 100})
        first.close()
    again = Board(tmp_path, first=4)  # steps 4 and 5 come again
    again.scalars(4, {"train/lm_loss": 7.0})
    again.close()
    assert len(os.listdir(tmp_path)) == 2
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in read.Scalars("train/lm_loss")] == [
        (1, 0.5),
        (2, 1.0),
        (3, 1.5),
        (4, 7.0),
    ]
    assert [e.value for e in read.Scalars("train/tokens")] == [100, 200, 300]


def test_damaged_lines_are_dropped_and_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        b'{"iteration": 1}',
        b'{"iterat',
        b"\xff\x00",
        b"3",
        b'{"iteration": 1.5}',
        b'{"iteration": true}',
        b'{"iteration": -1}',
        b'{"iteration": 2}',
        b'{"iteration": 3}',
        b'{"iter',
    ]
    path.write_bytes(b"\n".join(lines))
    with pytest.warns(UserWarning, match="6 lines of .*metrics.jsonl' are no records"):
        file = continued(path, 2)
    file.write(b'{"iteration": 3}\n')
    file.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2, 3]
