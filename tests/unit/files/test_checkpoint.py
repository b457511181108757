"""Checkpoint folders: which one is meant, what is refused, and that nothing in them is run."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, StorageMeta, TensorStorageMetadata
from torch.serialization import _get_layout

from megatron_fp8.files import checkpoint as files
from megatron_fp8.files.atomic_io import replace_file
from megatron_fp8.files.manifest import FORMAT
from tests.support.checkpoint_files import write_checkpoint


def save(checkpoints: Path, iteration: int) -> Path:
    """A checkpoint of two tensors, made without ranks: as many bytes in each file at every iteration, and other ones."""
    first = float(iteration - 2)
    w = torch.arange(first, first + 12).view(3, 4).bfloat16()
    return write_checkpoint(
        checkpoints, iteration, {"w": w, "n": torch.tensor([iteration + 1], dtype=torch.int64)}
    )


@pytest.fixture
def saved(tmp_path) -> Path:
    """The latest checkpoint in a run's folder."""
    folder = save(tmp_path / "run" / "checkpoints", 2)
    replace_file(folder.parent / "latest", folder.name + "\n")
    return folder


def test_every_path_to_it_means_it(saved):
    for path in (saved, saved.parent, saved.parent.parent):
        assert files.find_checkpoint(path) == saved
    assert files.latest_checkpoint(saved.parent) == saved
    assert files.latest_checkpoint(saved / "nothing") is None
    manifest = files.read_manifest(saved)
    assert (manifest.iteration, manifest.facts) == (2, {"layout": {"tensor": 1}})
    files.check_files(saved, manifest)


def test_latest_is_followed_while_it_names_something(saved):
    newer = saved.with_name("iter_0000009")
    newer.mkdir()
    saved.with_name(".saving-iter_0000010-x").mkdir()
    assert files.latest_checkpoint(saved.parent) == saved
    assert files.complete_checkpoints(saved.parent) == [saved, newer]
    for pointer in ("iter_0000777", "", "../../etc"):
        (saved.parent / "latest").write_text(pointer)
        assert files.latest_checkpoint(saved.parent) == newer
    (saved.parent / "latest").unlink()
    assert files.latest_checkpoint(saved.parent) == newer


def damage(name: str, saved: Path) -> None:
    shard = next(saved.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    if name == "cut off":
        shard.write_bytes(data[:-1])
    elif name == "altered":
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif name == "missing":
        shard.unlink()
    else:
        (saved / ".metadata").write_bytes(b"junk")


DAMAGE = {
    "cut off": "bytes and was written with",
    "altered": "SHA-256 differs",
    "missing": "is missing",
    "metadata": "bytes and was written with",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_another_checkpoint_named(saved, name):
    good = saved.with_name("iter_0000001")
    good.mkdir()
    damage(name, saved)
    with pytest.raises(ValueError) as error:
        files.check_files(saved, files.read_manifest(saved))
    assert DAMAGE[name] in str(error.value) and f"--resume={good}" in str(error.value)


@pytest.mark.parametrize("name", ["manifest.json", "__0_0.distcp"])
def test_what_is_swapped_with_another_steps_is_refused(saved, name):
    """Whole files, as long as those that belong there."""
    other = save(saved.parent, 3)
    one, two = (saved / name).read_bytes(), (other / name).read_bytes()
    assert len(one) == len(two)
    (saved / name).write_bytes(two), (other / name).write_bytes(one)
    words = (
        "SHA-256 differs"
        if name != "manifest.json"
        else "is of iteration [23], and its folder is named iter_"
    )
    for folder in (saved, other):
        with pytest.raises(ValueError, match=words):
            files.check_files(folder, files.read_manifest(folder))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "it has no manifest.json"),
        ("{", "is damaged"),
        ('{"format": "other"}', "is not the manifest of a megatron_fp8 checkpoint"),
        (json.dumps({"format": FORMAT, "version": 99}), "has version 99"),
    ],
)
def test_a_foreign_folder_is_refused(saved, content, words):
    manifest = saved / "manifest.json"
    manifest.unlink() if content is None else manifest.write_text(content)
    with pytest.raises(ValueError, match=words):
        files.read_manifest(saved)


POINTERS = {"device": "is a link out of its folder", "pipe": "ordinary file"}


def test_what_is_removed_while_it_is_read_is_not_called_damaged(saved, tmp_path):
    """As by a run that trains with checkpoint.keep_last."""
    manifest, metadata = files.read_manifest(saved), files.read_metadata(saved)
    name = next(iter(metadata.state_dict_metadata))
    saved.rename(tmp_path / "removed")
    for read in (
        lambda: files.check_files(saved, manifest),
        lambda: files.read_metadata(saved),
        lambda: files.read_tensor(saved, metadata, name),
    ):
        with pytest.raises(ValueError, match=r"was removed while it was read: .* reads a newer one"):
            read()


@pytest.mark.parametrize("kind", POINTERS)
def test_a_pointer_that_is_no_ordinary_file_is_not_read(saved, kind):
    """A device would be read without end, a pipe waited for."""
    pointer = saved.parent / "latest"
    pointer.unlink()
    if kind == "device":
        pointer.symlink_to("/dev/zero")
    else:
        os.mkfifo(pointer)
    with pytest.raises(ValueError, match=f"latest.* {POINTERS[kind]}"):
        files.find_checkpoint(saved.parent)


def test_a_pointer_that_is_no_text_names_nothing(saved):
    (saved.parent / "latest").write_bytes(b"\xd2\xff")
    with pytest.warns(UserWarning, match=f"which is not there: {saved.name} is taken"):
        assert files.latest_checkpoint(saved.parent) == saved


def test_an_unreadable_pointer_or_path_is_named(saved):
    (saved.parent / "latest").unlink()
    (saved.parent / "latest").mkdir()
    with pytest.raises(ValueError, match=r"latest' cannot be read \(Is a directory\)"):
        files.latest_checkpoint(saved.parent)
    (saved.parent / "latest").rmdir()
    (saved.parent / "latest").symlink_to("latest")
    with pytest.raises(ValueError, match="latest' cannot be read"):
        files.latest_checkpoint(saved.parent)
    with pytest.raises(ValueError, match="there is no such folder"):
        files.find_checkpoint(saved / "nowhere")


def test_tensors_are_read_whole(saved):
    metadata = files.read_metadata(saved)
    assert torch.equal(files.read_tensor(saved, metadata, "w"), torch.arange(12.0).view(3, 4).bfloat16())
    assert files.read_tensor(saved, metadata, "n").tolist() == [3]
    with pytest.raises(ValueError, match=r"is damaged: it has no layer\.amax"):  # of a scale that it has
        files.read_tensor(saved, metadata, "layer.amax_history")


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_no_pickle_runs(saved, tmp_path):
    mark = tmp_path / "ran"
    metadata = files.read_metadata(saved)
    for payload in (Bomb(mark), {"a": Bomb(mark)}, files.Manifest(1), torch.nn.Linear, getattr, print):
        (saved / ".metadata").write_bytes(pickle.dumps(payload))
        with pytest.raises(ValueError, match="not the metadata of a checkpoint"):
            files.read_metadata(saved)
    (saved / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="it holds dict"):
        files.read_metadata(saved)
    place = next(iter(metadata.storage_data.values()))
    bomb = io.BytesIO()
    torch.save(Bomb(mark), bomb)
    (saved / place.relative_path).write_bytes(bomb.getvalue())
    for entry in metadata.storage_data.values():
        entry.offset, entry.length = 0, len(bomb.getvalue())
    with pytest.raises(ValueError, match="cannot be read"):
        files.read_tensor(saved, metadata, "w")
    assert not mark.exists()


def test_metadata_of_another_torch_is_said_to_be_that(saved):
    """torch 2.15 keeps more of a tensor than 2.13 can take."""
    (saved / ".metadata").write_bytes(b"newer")
    manifest = files.read_manifest(saved)
    for written in ("99.0.0", torch.__version__):
        manifest.facts["versions"] = {"torch": written}
        manifest.write(saved)
        with pytest.raises(ValueError, match="not the metadata of a checkpoint") as error:
            files.read_metadata(saved)
        assert ("written with torch 99.0.0" in str(error.value)) == (written == "99.0.0")


FORMATS = b"ctorch.distributed.checkpoint.metadata\n"
CHANGES = {
    "TensorStorageMetadata": FORMATS + b"TensorStorageMetadata\nN}X\x06\x00\x00\x00chunksK\x01s\x86b",
    "_MEM_FORMAT_ENCODING": FORMATS + b"_MEM_FORMAT_ENCODING\nK\x00\x85R}X\x07\x00\x00\x00_value_K\x09sb",
    "_get_layout": b"ctorch.serialization\n_get_layout\nN}X\x0c\x00\x00\x00__defaults__K\x01\x85s\x86b",
    "its attributes": b"ctorch.serialization\n_get_layout\n}X\x01\x00\x00\x00xK\x01sb",
    "its name": FORMATS + b"StorageMeta\nN}X\x08\x00\x00\x00__name__X\x01\x00\x00\x00xs\x86b",
}
"""Opcodes that set the state of this process's own class, enum member or function."""


def of_the_process() -> list[Any]:
    """What CHANGES would change."""
    members = [(dict(vars(member)), type(member)) for member in _MEM_FORMAT_ENCODING]
    of_classes = [(dict(vars(each)), each.__name__) for each in (TensorStorageMetadata, StorageMeta)]
    return [members, of_classes, _get_layout.__defaults__, dict(vars(_get_layout))]


@pytest.mark.parametrize("what", CHANGES)
def test_a_pickle_cannot_change_the_classes_that_it_may_make(saved, what):
    """BUILD sets attributes, also those of a class, an enum's member or a function: a later save would write what they
    say. The metadata behind it is whole, so that nothing else is wrong with the file."""
    whole = pickle.dumps(files.read_metadata(saved), protocol=2)
    (saved / ".metadata").write_bytes(b"\x80\x02" + CHANGES[what] + b"0" + whole[2:])
    unchanged = of_the_process()
    with pytest.raises(ValueError, match=r"it changes \w+, which it has not made"):
        files.read_metadata(saved)
    assert of_the_process() == unchanged


@pytest.mark.parametrize("opcodes", [b"ctorch\ndevice\n)R.", b"c" + b"x" * 5000 + b"\ny\n."])
def test_what_a_pickle_makes_go_wrong_is_a_short_line(saved, opcodes):
    """torch says in four lines what a device is made of."""
    (saved / ".metadata").write_bytes(b"\x80\x02" + opcodes)
    with pytest.raises(ValueError, match=r"not the metadata of a checkpoint \(.") as error:
        files.read_metadata(saved)
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 1000


def to_another_file(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../../secret"


def to_a_packed_file(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


def larger(metadata: Any) -> None:
    for name, entry in list(metadata.state_dict_metadata.items()):
        size = torch.Size([1 << 50, *entry.size[1:]])
        entry.chunks[0].sizes = size
        metadata.state_dict_metadata[name] = dataclasses.replace(entry, size=size)


def with_a_hole(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].chunks.clear()


def outside(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([2, 6])


def of_no_tensor(metadata: Any) -> None:
    metadata.state_dict_metadata["w"] = 3


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (to_another_file, "lies outside, in '../../secret'"),
        (to_a_packed_file, "is not stored as it should be"),
        (larger, "is not stored as it should be"),
        (with_a_hole, "w has 0 values"),
        (outside, "w has a part outside its shape"),
        (of_no_tensor, "is damaged"),
    ],
)
def test_metadata_describes_what_its_folder_can_hold(saved, edit, words):
    metadata = files.read_metadata(saved)
    edit(metadata)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError) as error:
        files.read_metadata(saved)
    assert words in str(error.value)


def test_a_file_that_the_manifest_does_not_list_is_not_believed(saved):
    for name in (".metadata", next(saved.glob("*.distcp")).name):
        manifest = files.read_manifest(saved)
        del manifest.files[name]
        with pytest.raises(ValueError, match=f"its manifest does not list {name}"):
            files.check_files(saved, manifest)


def test_the_folders_name_is_the_iteration(saved):
    for name in ("iter_0000003", "not_finite_0000003"):
        other = saved.rename(saved.with_name(name))
        with pytest.raises(ValueError, match=f"is of iteration 2, and its folder is named {name}"):
            files.read_manifest(other)
        other.rename(saved)
    copy = saved.rename(saved.with_name("best"))
    assert files.read_manifest(copy).iteration == 2


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("gone")


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("manifest.json", folder), ("manifest.json", pipe), ("manifest.json", device), (".metadata", loop),
        (".metadata", device), ("__0_0.distcp", pipe), ("__0_0.distcp", nowhere),
    ],
)  # fmt: skip
def test_whatever_stands_for_a_file_is_a_line(saved, name, change):
    change(saved / name)
    with pytest.raises(ValueError) as error:
        files.check_files(saved, files.read_manifest(saved))
    assert len(str(error.value).splitlines()) == 1
    if name == ".metadata":
        with pytest.raises(ValueError):
            files.read_metadata(saved)


@pytest.mark.parametrize(
    ("shut", "given"),
    [
        ("run", "run"),
        ("checkpoints", "run"),
        ("iter_0000003", "run"),
        ("iter_0000003", "run/checkpoints/iter_0000003"),
    ],
)
def test_a_folder_that_may_not_be_looked_into_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shut: str, given: str
) -> None:
    """Another user's, as a process that is not root sees it."""
    write_checkpoint(tmp_path / "run" / "checkpoints", 3, {})

    def refusing(function: Any, itself: bool = False) -> Any:
        def call(path: Any, *args: Any, **more: Any) -> Any:
            within = Path(path).parts if itself else Path(path).parent.parts
            if shut in within:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return function(path, *args, **more)

        return call

    for name in ("stat", "lstat", "open"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    monkeypatch.setattr(os, "listdir", refusing(os.listdir, itself=True))
    with pytest.raises(ValueError, match=r"(cannot be read|cannot be listed) \(Permission denied\)"):
        files.check_files((folder := files.find_checkpoint(tmp_path / given)), files.read_manifest(folder))
