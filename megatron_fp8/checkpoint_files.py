"""A checkpoint as files: which folder is complete, which is the latest, what is in it. No ranks, no Megatron-Core.

A folder of checkpoints holds

    latest               the name of the newest complete checkpoint, replaced atomically
    iter_0000100/        a complete checkpoint: it got this name after everything in it was on the disk
      manifest.json      ours: what was saved, and the size and SHA-256 of every other file
      .metadata          torch.distributed.checkpoint's: where in which file each tensor lies (a pickle)
      __0_0.distcp, ...  tensors, one file a rank
      metadata.json, common.pt    for Megatron-Core's own loader; common.pt is empty
    .saving-...          a save that is under way, or was killed; never read, removed by the next save

The name is the commit. A scheme that marks a folder complete by a file inside it was rejected: between the first byte and
the mark, everybody who lists the folder has to know of it.

Only ``.metadata`` is unpickled, by an unpickler that makes the classes of its format and nothing else. Tensors are read
with weights_only, everything else is JSON. A file that was cut off or altered is found by the manifest before training.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

FORMAT, VERSION = "megatron_fp8 checkpoint", 1
MANIFEST, LATEST, METADATA = "manifest.json", "latest", ".metadata"
_CHUNK = 1 << 22


@dataclass
class Manifest:
    """What manifest.json says.

    Attributes:
        iteration: finished when it was saved.
        state: numbers that training continues from.
        facts: layout, precision, model and versions of the run that saved it.
        files: name -> {"bytes", "sha256"} of every other file.
    """

    iteration: int
    state: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write ``<folder>/manifest.json``, down to the disk."""
        content = {"format": FORMAT, "version": VERSION, **vars(self)}
        write_file(folder / MANIFEST, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises ValueError: there is none, it cannot be read, or it is not this package's.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "it has no manifest.json" if folder.is_dir() else "there is no such folder"
        raise ValueError(
            f"{str(folder)!r} is not a checkpoint of megatron_fp8: {what}. Give a folder such as "
            "RUN_DIR/checkpoints/iter_0000100, or a run's folder."
        ) from None
    except OSError as error:
        raise ValueError(
            f"{str(path)!r} cannot be read ({error.strerror}): check its permissions."
        ) from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}): {_use_another(folder)}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"{str(path)!r} is not the manifest of a megatron_fp8 checkpoint: give another folder."
        )
    if content.get("version") != VERSION:
        raise ValueError(
            f"{str(path)!r} has version {content.get('version')!r}, and this megatron_fp8 reads version {VERSION}: use"
            " the version of megatron_fp8 that wrote it."
        )
    try:
        return Manifest(content["iteration"], content["state"], content["facts"], content["files"])
    except KeyError as error:
        raise ValueError(f"{str(path)!r} is damaged ({error} is missing): {_use_another(folder)}") from error


def check_files(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """ValueError if a file is missing, cut off, altered or unreadable: ``names``, by default all, read whole."""
    for name in manifest.files if names is None else names:
        path, expected = folder / name, manifest.files[name]
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                problem = f"has {size} bytes and was written with {expected['bytes']}"
            elif digest(path) != expected["sha256"]:
                problem = "is not what was written (its SHA-256 differs)"
            else:
                continue
        except FileNotFoundError:
            problem = "is missing"
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        raise ValueError(
            f"the checkpoint {str(folder)!r} is damaged: {name} {problem}. {_use_another(folder)}"
        )


def _use_another(folder: Path) -> str:
    """The remedy: the newest other complete checkpoint, if there is one."""
    others = [path for path in complete_checkpoints(folder.parent) if path != folder]
    if others:
        return f"Another one is complete: {others[-1]} (to train on from it: --resume={others[-1]})."
    return "Give another checkpoint (to train: --resume=PATH, or --resume=never)."


def file_record(path: Path) -> dict[str, Any]:
    """A manifest's entry for a file."""
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    hasher = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


# ------------------------------------------------------------------------------------------------------ which folder


def folder_name(iteration: int) -> str:
    """The name of the checkpoint of an iteration."""
    return f"iter_{iteration:07d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in ``folder`` that were committed, oldest iteration first; empty if there is no such folder."""
    try:
        entries = list(folder.iterdir()) if folder.is_dir() else []
    except OSError:
        return []
    found = {int(m[1]): path for path in entries if (m := re.fullmatch(r"iter_(\d{7,})", path.name))}
    return [found[iteration] for iteration in sorted(found)]


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that ``latest`` names; where it names none that is there, the newest committed one; else None.

    Raises ValueError if ``latest`` cannot be read.
    """
    pointer = folder / LATEST
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        name = ""
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{str(pointer)!r} cannot be read ({error}): give --resume=PATH of a checkpoint."
        ) from error
    if re.fullmatch(r"iter_\d{7,}", name) and (folder / name).is_dir():
        return folder / name
    complete = complete_checkpoints(folder)
    return complete[-1] if complete else None


def find_checkpoint(path: Path) -> Path:
    """The checkpoint folder that a user's path means: itself, the latest in it, or the latest of that run.

    Raises ValueError if there is none.
    """
    for folder in (path, path / "checkpoints"):
        if (folder / MANIFEST).exists() or not folder.is_dir():
            continue
        if found := latest_checkpoint(folder):
            return found
    read_manifest(path)
    return path


# ------------------------------------------------------------------------------------------------- down to the disk


def write_file(path: Path, text: str) -> None:
    """Write ``text`` and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, text: str) -> None:
    """Put ``text`` in place of what the file holds: whoever looks, now or after a crash, sees the old or the new."""
    beside = path.with_name(f".{path.name}.new")
    write_file(beside, text)
    beside.replace(path)
    sync(path.parent)


# ---------------------------------------------------------------------------------------------- torch_dist's metadata

_PLAIN = {
    "collections": {"OrderedDict"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what torch.distributed.checkpoint writes into .metadata, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint's .metadata")


def read_metadata(folder: Path) -> Any:
    """torch_dist's ``.metadata``: ``state_dict_metadata`` has shape and dtype by tensor name.

    Raises ValueError if it is missing, cut off, or asks for anything but the classes of its format.
    """
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    path = folder / METADATA
    try:
        with path.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
    except FileNotFoundError:
        raise ValueError(f"the checkpoint {str(folder)!r} is damaged: .metadata is missing.") from None
    except OSError as error:
        raise ValueError(
            f"{str(path)!r} cannot be read ({error.strerror}): check its permissions."
        ) from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(f"{str(path)!r} is not the metadata of a checkpoint ({error}).") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(
            f"{str(path)!r} is not the metadata of a checkpoint (it holds {type(metadata).__name__})."
        )
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    return metadata


def read_tensor(folder: Path, metadata: Any, name: str) -> torch.Tensor:
    """One whole tensor of a checkpoint, put together from its shards, on the CPU.

    Args:
        metadata: of ``read_metadata``.

    Raises ValueError if it is damaged.
    """
    entry = metadata.state_dict_metadata[name]
    whole = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
    places = {(index.fqn, index.offset): place for index, place in metadata.storage_data.items()}
    for chunk in entry.chunks:
        place = places[name, chunk.offsets]
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"{str(folder)!r} is damaged: {name} lies outside, in {place.relative_path!r}.")
        try:
            with (folder / place.relative_path).open("rb") as stream:
                stream.seek(place.offset)
                part = torch.load(io.BytesIO(stream.read(place.length)), weights_only=True)
        except Exception as error:  # of a damaged file torch.load raises nearly anything
            raise ValueError(f"{name} in {str(folder)!r} cannot be read ({error}).") from error
        window = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[window] = part.reshape(chunk.sizes)
    return whole
