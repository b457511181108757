"""Records through full disks: every byte in its place, and a warning once."""

import errno
import json
import os
import warnings

import pytest

from megatron_fp8.files import records
from megatron_fp8.files.records import EventFile, RecordFile, continue_file, warn_missing


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
    file = RecordFile(path)
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
    file = RecordFile(tmp_path / "metrics.jsonl")
    disk.room = 3
    with pytest.warns(UserWarning) as warned:
        file.write(b"0123456789")
        lacking = [*file.close(), *file.close()]
        warn_missing([])
        warn_missing([*lacking, "another"])
    assert lacking == [f"{str(tmp_path / 'metrics.jsonl')!r} lacks its last 7 bytes"]
    assert len(warned) == 2
    assert str(warned[-1].message).startswith(f"records are lost: {lacking[0]}, another.")


RECORDS = [f'{{"iteration": {n}}}\n'.encode() for n in range(6)]


def after(tmp_path, happens):
    """What is in metrics.jsonl, and what it lacks, where something happens to it after three records, twice."""
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    file = RecordFile(path)
    with pytest.warns(UserWarning, match="was removed, replaced or cut while it was written") as warned:
        for number, record in enumerate(RECORDS):
            if number in (3, 4):
                happens(path)
            file.write(record)
        lacks = file.close()
    assert len(warned) == 1
    return path.read_bytes(), lacks


def test_a_file_that_is_replaced_by_its_copy_has_every_record(tmp_path):
    """As `sed -i` and editors do."""

    def edit(path):
        path.with_name("copy").write_bytes(path.read_bytes())
        path.with_name("copy").replace(path)

    assert after(tmp_path, edit) == (b"".join(RECORDS), [])


@pytest.mark.parametrize("happens", [os.unlink, lambda path: os.truncate(path, 0)], ids=["removed", "cut"])
def test_a_file_that_is_removed_or_cut_has_what_comes_then(tmp_path, happens):
    size = len(b"".join(RECORDS[:4]))
    lacks = [f"{str(tmp_path / 'run' / 'metrics.jsonl')!r} lacks what was removed from it, {size} bytes"]
    assert after(tmp_path, happens) == (b"".join(RECORDS[4:]), lacks)


def test_a_link_becomes_a_file_and_that_is_said(tmp_path):
    """What a run writes leads nowhere outside of its folder."""
    (tmp_path / "elsewhere.jsonl").write_bytes(RECORDS[1])
    (tmp_path / "metrics.jsonl").symlink_to("elsewhere.jsonl")
    with pytest.warns(UserWarning, match=r"metrics.jsonl' is a link to 'elsewhere.jsonl'"):
        file = continue_file(tmp_path / "metrics.jsonl", 1)
    file.write(RECORDS[2])
    assert (tmp_path / "metrics.jsonl").read_bytes() == RECORDS[1] + RECORDS[2]
    assert (tmp_path / "elsewhere.jsonl").read_bytes() == RECORDS[1] and not file.close()


def test_a_folder_that_is_moved_away_is_said(tmp_path):
    """Until somebody makes one of its name again, as the next checkpoint does."""
    (tmp_path / "run").mkdir()
    file = RecordFile(tmp_path / "run" / "metrics.jsonl")
    file.write(RECORDS[0])
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.warns(UserWarning) as warned:
        file.write(RECORDS[1])
        (tmp_path / "run").mkdir()
        file.write(RECORDS[2])
        lacks = file.close()
    assert [str(one.message).partition("' ")[2][:17] for one in warned] == [
        "was removed, repl",
        "cannot be written",
    ]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == RECORDS[1] + RECORDS[2]
    assert len(lacks) == 1 and lacks[0].endswith(f"lacks what was removed from it, {len(RECORDS[0])} bytes")


def test_tensorboard_reads_what_was_written(tmp_path, disk):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = EventFile(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, 6):
            disk.room = 5 if step == 2 else 10**9 if step == 4 else disk.room
            first.scalars(step, {"train/lm_loss": step / 2, "train/tokens": step * 100})
        first.close()
    again = EventFile(tmp_path, first=4)  # steps 4 and 5 come again
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


def test_damaged_lines_are_dropped_and_the_first_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        b'{"iteration": 1}', b'{"iterat', b"\xff\x00", b"3", b'{"iteration": 1.5}', b'{"iteration": 2}',
        b'{"iteration": 3}', b'{"iter',
    ]  # fmt: skip
    path.write_bytes(b"\n".join(lines))
    with pytest.warns(
        UserWarning, match=r"^line 2 of '.*metrics.jsonl' is no JSON .*: it is dropped, and so are 3 more"
    ):
        file = continue_file(path, 2)
    file.write(b'{"iteration": 3}\n')
    file.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_iterations_without_a_record_are_said(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"iteration": {n}}}\n' for n in (4, 5, 8, 9)))
    for each in (range(4, 6), range(8, 10), range(0)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            continue_file(path, 9, 1, each).close()
    words = (
        r"metrics.jsonl' has no record of 2 of the iterations 4 to 9, which are done, the first of them 6: "
    )
    with pytest.warns(UserWarning, match=words):
        continue_file(path, 9, 1, range(4, 10)).close()
    path.unlink()
    with pytest.warns(UserWarning, match="has no record of 9 of the iterations 1 to 9"):
        continue_file(path, 9, 1, range(1, 10)).close()


@pytest.mark.parametrize("value", ["1.5", "0", "true"])
def test_an_iteration_that_is_none_is_dropped_and_named_with_its_value(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"iteration": 1}}\n{{"iteration": {value}}}\n{{"iteration": 2}}\n')
    with pytest.warns(UserWarning) as warned:
        continue_file(path, 2, 1).close()
    (said,) = [str(one.message) for one in warned]
    shown = value.capitalize()
    assert said == (
        f"line 2 of {str(path)!r} has the iteration {shown}, and that is a whole number from 1 on: it is dropped."
    )
    assert path.read_text() == '{"iteration": 1}\n{"iteration": 2}\n'
