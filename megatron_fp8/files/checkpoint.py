"""Checkpoint folders: lists, the latest, contents and checks; without ranks or Megatron-Core.

A folder of checkpoints holds

    latest               the name of the newest complete checkpoint, replaced atomically
    iter_0000100/        a complete checkpoint: it gets this name after everything in it is on the disk
      manifest.json      this package's: what was saved, and the size and SHA-256 of every other file
      .metadata          torch.distributed.checkpoint's: file and offset of each tensor (a pickle)
      __0_0.distcp, ...  tensors, one file per rank
      metadata.json, common.pt    for Megatron-Core's own loader; common.pt is empty
    not_finite_0000120/  a checkpoint with NaN or Inf, which training cannot use: read only if its own path is given
    .saving-...          a save that is running, or was killed; never read, removed by the next save

The rename is the commit. Rejected: a marker file in a complete folder. Every program that lists folders would have to
check for it.

Only ``.metadata`` is unpickled (checkpoint_metadata.py). Tensors are read with weights_only, everything else is JSON. The
manifest reveals truncated and altered files before training.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from .atomic_io import as_value_error, error_text, read_regular, refuse_link_out, require_regular
from .checkpoint_metadata import MetadataUnpickler, check_metadata
from .gc_pause import gc_paused
from .manifest import LARGEST, MANIFEST, Manifest, NotAManifest, parse
from .terminal import warn_user
from .user_paths import note_checkpoint_folder, path_hint

_P = ParamSpec("_P")
_T = TypeVar("_T")
LATEST, METADATA, _MEGATRON_METADATA = "latest", ".metadata", "metadata.json"
_CHUNK = 1 << 22
_NAMED = re.compile(r"(?:iter|not_finite)_(\d{7,})")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises ValueError if it is missing, damaged, not this package's, from another folder, or a link out of the folder.
    """
    path = folder / MANIFEST
    refuse_link_out(path)
    try:
        manifest = parse(read_regular(path, LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        what = "there is no such folder"
        if folder.is_dir():
            what = f"it has no manifest.json, and no checkpoint is in it.{note_checkpoint_folder(folder)}"
        elif folder.exists():
            what = "it is a file"
        instead = path_hint(folder) or "give a folder such as RUN_DIR/checkpoints/iter_0000100, or a run's"
        what = f"{what.removesuffix('.')}. {instead[0].upper()}{instead[1:]}"
        raise ValueError(f"{str(folder)!r} is not a checkpoint of megatron_fp8: {what}.") from None
    except OSError as error:
        raise ValueError(
            f"{str(path)!r} cannot be read ({error_text(error)}){_permission_hint(error)}."
        ) from error
    except NotAManifest as error:
        raise ValueError(f"{str(path)!r} {error}.") from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}): {other_checkpoint_hint(folder)}") from error
    match = _NAMED.fullmatch(Path(os.path.abspath(folder)).name)
    if match and int(match[1]) != manifest.iteration:
        raise ValueError(
            f"{str(path)!r} is of iteration {manifest.iteration}, and its folder is named {match[0]}: one of them was"
            f" changed. {other_checkpoint_hint(folder)}"
        )
    return manifest


def missing_checksum_note(manifest: Manifest) -> list[str]:
    """A line for the user if the manifest has no checksum (version 1); else none."""
    if manifest.checked:
        return []
    return ["the checkpoint's manifest is of an earlier version, which had no checksum: it is used unchecked"]


def expert_override_notes(manifest: Manifest, overrides: Collection[str]) -> list[str]:
    """A line for each override that applied to more experts when the checkpoint was saved than now."""
    return [
        f"fp8_overrides={key!r} names one expert of the whole model; when the checkpoint was saved it named one on each"
        f" rank, {', '.join(several)}: name all of them to go on as before"
        for key, several in manifest.of_each_rank.items()
        if key in overrides and not set(several) <= set(overrides)
    ]


def _report_removal(read: Callable[Concatenate[Path, _P], _T]) -> Callable[Concatenate[Path, _P], _T]:
    """Decorate a reader of a checkpoint's folder: if the folder was removed meanwhile, its error says so."""

    @functools.wraps(read)
    def reader(folder: Path, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return read(folder, *args, **kwargs)
        except ValueError as error:
            if os.path.isdir(folder):
                raise
            raise ValueError(
                f"the checkpoint {str(folder)!r} was removed while it was read: a run that trains removes all but its"
                " newest ones (checkpoint.keep_last). The same command again reads a newer one."
            ) from error

    return reader


@_report_removal
def check_files(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Raise ValueError if a file is missing, truncated, altered, unreadable or a link out of the folder.

    Reads the files in ``names``, by default all, completely.
    """
    for name in manifest.files if names is None else names:
        path, expected = folder / name, manifest.files[name]
        refuse_link_out(path)
        try:
            size = require_regular(path.stat()).st_size
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
            f"the checkpoint {str(folder)!r} is damaged: {name} {problem}. {other_checkpoint_hint(folder)}"
        )
    if names is None:
        check_listed(folder, manifest)


def check_listed(folder: Path, manifest: Manifest) -> None:
    """Raise ValueError if tensors lie in a file that the manifest does not list, and so does not protect."""
    used_files = {METADATA, *(place.relative_path for place in read_metadata(folder).storage_data.values())}
    used_files |= {_MEGATRON_METADATA} if (folder / _MEGATRON_METADATA).exists() else set()
    if missing := sorted(used_files - set(manifest.files)):
        raise ValueError(
            f"the checkpoint {str(folder)!r} is damaged: its manifest does not list {missing[0]}."
            f" {other_checkpoint_hint(folder)}"
        )


def other_checkpoint_hint(folder: Path) -> str:
    """A remedy for messages: the newest other complete checkpoint, if there is one."""
    others = [path for path in complete_checkpoints(folder.parent) if path != folder]
    if others:
        return f"Another one is complete: {others[-1]} (to train on from it: --resume={others[-1]})."
    return "Give another checkpoint (to train: --resume=PATH, or --resume=never)."


def file_record(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest."""
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    hasher = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


# --------------------------------------------------------------------------------------------------- names and selection


def folder_name(iteration: int) -> str:
    """The name of the checkpoint of an iteration."""
    return f"iter_{iteration:07d}"


def iteration_of(checkpoint: Path) -> int:
    """The iteration in a checkpoint's name, which ``folder_name`` or ``not_finite_name`` made."""
    return int(checkpoint.name.rpartition("_")[2])


def has_usual_name(checkpoint: Path) -> bool:
    """Whether a folder's name has the form of ``folder_name`` or ``not_finite_name``."""
    return _NAMED.fullmatch(checkpoint.name) is not None


def not_finite_name(iteration: int) -> str:
    """The name of the checkpoint of an iteration after which weights or optimizer state had NaN or Inf."""
    return f"not_finite_{iteration:07d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints in ``folder``, oldest iteration first; empty if there is no such folder."""
    return _checkpoints(folder, r"iter_(\d{7,})")


def not_finite_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints with NaN or Inf in ``folder``, oldest iteration first."""
    return _checkpoints(folder, r"not_finite_(\d{7,})")


def _checkpoints(folder: Path, pattern: str) -> list[Path]:
    with as_value_error(f"{str(folder)!r} cannot be listed", ": check its permissions."):
        entries = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    by_iteration = [(int(m[1]), path) for path in entries if (m := re.fullmatch(pattern, path.name))]
    return [path for _, path in sorted(by_iteration)]


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that ``latest`` names; without that file, the newest committed one; else None.

    If ``latest`` names a missing checkpoint, the newest existing one is returned, with a warning.

    Raises ValueError if ``latest`` or the folder cannot be read, if ``latest`` is a link out of the folder, or if it
    names a missing checkpoint and there is no other.
    """
    pointer = folder / LATEST
    refuse_link_out(pointer)
    try:
        name = read_regular(pointer, 4096).decode("utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        complete = complete_checkpoints(folder)
        return complete[-1] if complete else None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{str(pointer)!r} cannot be read ({error_text(error)}): give --resume=PATH of a checkpoint."
        ) from error
    if re.fullmatch(r"iter_\d{7,}", name) and (folder / name).is_dir():
        return folder / name
    missing = f"{str(pointer)!r} names {name!r}, which is not there"
    if not (complete := complete_checkpoints(folder)):
        raise ValueError(
            f"{missing}, and neither is another checkpoint: bring it back, or give another one (to train: --resume=PATH,"
            " or --resume=never)."
        )
    warn_user(f"{missing}: {complete[-1].name} is taken, the newest that is.")
    return complete[-1]


def find_checkpoint(path: Path) -> Path:
    """The checkpoint folder for a user's path: the path itself, the latest in it, or the latest of that run.

    Raises ValueError if there is none.
    """
    for folder in (path, path / "checkpoints"):
        # A folder without read permission is reported by read_manifest.
        if os.path.exists(folder / MANIFEST) or not os.path.isdir(folder):
            continue
        if latest := latest_checkpoint(folder):
            return latest
    read_manifest(path)
    return path


# ---------------------------------------------------------------------------------------------- torch_dist's metadata

LARGEST_METADATA = 1 << 31
"""Limit in bytes for ``.metadata``: about ten million shards."""


@gc_paused()
@_report_removal
def read_metadata(folder: Path) -> Any:
    """torch_dist's ``.metadata``; its ``state_dict_metadata`` has shape and dtype by tensor name.

    Raises ValueError if it is missing, truncated or a link out of its folder, if it names a class outside its format,
    or if it describes tensors that its folder cannot contain.
    """
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    path = folder / METADATA
    refuse_link_out(path)
    try:
        metadata = MetadataUnpickler(read_regular(path, LARGEST_METADATA)).load()
    except FileNotFoundError:
        raise ValueError(
            f"the checkpoint {str(folder)!r} is damaged: .metadata is missing. {other_checkpoint_hint(folder)}"
        ) from None
    except OSError as error:
        raise ValueError(
            f"{str(path)!r} cannot be read ({error_text(error)}){_permission_hint(error)}."
        ) from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(
            f"{str(path)!r} is not the metadata of a checkpoint ({_one_line(error)})."
            f" {_other_torch(folder)}{other_checkpoint_hint(folder)}"
        ) from error
    if not isinstance(metadata, Metadata):
        raise ValueError(
            f"{str(path)!r} is not the metadata of a checkpoint (it holds {type(metadata).__name__})."
        )
    try:
        check_metadata(metadata)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}). {other_checkpoint_hint(folder)}") from error
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    return metadata


def _permission_hint(error: OSError) -> str:
    return ": check its permissions" if error.errno in (errno.EACCES, errno.EPERM) else ""


def _one_line(error: Exception) -> str:
    """The first 300 characters of an error's first line: torch's messages, and names from a pickle, may be long."""
    first = next(iter(str(error).splitlines()), "") or type(error).__name__
    return first if len(first) < 300 else f"{first[:297]}..."


def _other_torch(folder: Path) -> str:
    """A hint if another release of torch wrote it: newer releases add fields that older ones cannot read."""
    try:
        versions = read_manifest(folder).facts.get("versions")
    except ValueError:
        return ""
    written = versions.get("torch") if isinstance(versions, dict) else None
    if written in (None, torch.__version__):
        return ""
    return f"It was written with torch {written}, and this is torch {torch.__version__}: try that one. "


@_report_removal
def read_tensor(folder: Path, metadata: Any, name: str) -> torch.Tensor:
    """One whole tensor of a checkpoint, assembled from its shards, on the CPU; any shape and dtype.

    Args:
        metadata: from ``read_metadata``.

    Raises ValueError if it is damaged.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex

    entry = metadata.state_dict_metadata.get(name)
    if entry is None:
        raise ValueError(f"{str(folder)!r} is damaged: it has no {name}.")
    whole = torch.zeros(entry.size, dtype=entry.properties.dtype, device="cpu")
    for chunk in entry.chunks:
        place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        window = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        refuse_link_out(folder / place.relative_path)
        try:
            with (folder / place.relative_path).open("rb") as stream:
                stream.seek(place.offset)
                part = torch.load(
                    io.BytesIO(stream.read(place.length)), map_location="cpu", weights_only=True
                )
            whole[window] = part.reshape(chunk.sizes)
        except Exception as error:  # for a damaged file torch.load raises nearly anything
            raise ValueError(f"{name} in {str(folder)!r} cannot be read ({error}).") from error
    return whole
