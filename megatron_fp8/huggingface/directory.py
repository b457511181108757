"""Hugging Face directories: config.json, and safetensors in one or several files.

A directory is written under a temporary name next to its final one, and renamed after everything is on disk.
So readers see a complete model or none.
"""

from __future__ import annotations

import contextlib
import glob
import json
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..files.atomic_io import as_value_error, refuse_link_out, remedy, sync, write_file
from ..files.strict_json import load_json
from ..files.terminal import warn_user
from ..numerics.formats import E2M1

CONFIG, GENERATION = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)

# safetensors' dtype names, for messages.
_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U8": torch.uint8, "I8": torch.int8,
    "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_POINTER = b"version https://git-lfs.github.com/spec/"


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Context: a folder to write into. It becomes `path` if the block succeeds, and is removed otherwise.

    Warns of leftovers of killed runs for the same path: they take space and are never read.

    Raises ValueError: `path` exists and is not empty, or cannot be written.
    """
    if not path.name or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise ValueError(f"{str(path)!r} is there already: give a new folder, or remove it.")
    for leftover in sorted(path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}")):
        warn_user(
            f"{str(leftover)!r} is unfinished: remove it, unless something else writes {str(path)!r} now."
        )
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with name_write_errors(path):
            unfinished.mkdir(parents=True)
            yield unfinished
            for entry in [*unfinished.rglob("*"), unfinished]:
                sync(entry)
            unfinished.replace(path)
            sync(path.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def name_write_errors(path: Path) -> Iterator[None]:
    """Context: turns disk errors into a ValueError that names the directory."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be written ({error}): {remedy(error)}, or give another folder."
        ) from error


# ------------------------------------------------------------------------------------------------------------- writing


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object formatted as by Hugging Face's tools."""
    write_file(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_tensors(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> list[str]:
    """Write named tensors in order, in files of at most `shard_bytes` (or one tensor); returns the file
    names.

    One shard is in memory at a time. A single file has no index, several have one, as with Hugging Face's
    tools.
    """
    shards: list[dict[str, int]] = []
    waiting: dict[str, torch.Tensor] = {}
    size = 0

    def flush() -> None:
        save_file(waiting, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append({name: tensor.nbytes for name, tensor in waiting.items()})
        waiting.clear()

    for name, tensor in tensors:
        if waiting and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        waiting[name] = tensor.contiguous()
        size += tensor.nbytes
    flush()

    count = len(shards)
    names = [
        f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
        for number in range(1, count + 1)
    ]
    readable = folder.stat().st_mode & 0o666  # safetensors creates files readable by the owner only
    for number, name in enumerate(names):
        (folder / f"shard-{number}").rename(folder / name).chmod(readable)
    if count > 1:
        places = {
            tensor: name for name, shard_size in zip(names, shards, strict=True) for tensor in shard_size
        }
        total = sum(sum(shard_size.values()) for shard_size in shards)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    return names


# ------------------------------------------------------------------------------------------------------------- reading


def find_file(folder: Path, name: str) -> Path | None:
    """A file of an untrusted directory; None if missing.

    A symbolic link may point to another file of the directory, or, as in Hugging Face's cache, from a
    snapshot to the blobs of the same model.

    Raises ValueError: a link points elsewhere or is broken, or the entry is not a file, or is a git LFS
    pointer.
    """
    path = folder / name
    if not path.is_symlink() and not path.exists():
        return None
    refuse_link_out(path)
    target = path.resolve()
    if not target.exists():
        raise ValueError(
            f"{str(path)!r} is a link to {str(target)!r}, which is not there: complete the download, or remove the link."
        )
    if not target.is_file():
        raise ValueError(f"{str(path)!r} is not a file.")
    with as_value_error(f"{str(path)!r} cannot be read", ": make it readable."), target.open("rb") as stream:
        start = stream.read(len(_POINTER))
    if start == _POINTER:
        raise ValueError(f"{str(path)!r} is a pointer of git LFS and not the file: run git lfs pull there.")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file. Raises ValueError if the file is missing, unreadable, or not a JSON object."""
    if find_file(path.parent, path.name) is None:
        instead = "give a folder as transformers' save_pretrained writes it"
        name = str(path.parent)
        if not path.parent.exists() and _HUB_NAME.fullmatch(name):
            own = path.parent.name
            instead = (
                "there is no such folder; to download it from the Hugging Face Hub: pip install huggingface_hub &&"
                f" hf download {name} --local-dir {own} && megatron-fp8 import {own} RUN_DIR"
            )
        elif not path.parent.is_dir():
            instead = f"{'it is a file' if path.parent.exists() else 'there is no such folder'}; {instead}"
        if (path.parent / "adapter_config.json").exists():
            instead = "it is an adapter; merge it into its model (merge_and_unload) and save that"
        raise ValueError(f"{str(path.parent)!r} has no {path.name}: {instead}.")
    with as_value_error(
        f"{str(path)!r} cannot be read", ": put another in its place.", (OSError, ValueError)
    ):
        content = load_json(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} is not an object, but {type(content).__name__}.")
    return content


_LONGEST_NAME = 256  # longer than real tensor names


def _places(folder: Path) -> dict[str, str]:
    """Tensor -> file, from the index."""
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(
        isinstance(file, str) and len(file) < _LONGEST_NAME for file in places.values()
    ):
        raise ValueError(f"{str(folder / INDEX)!r} has no weight_map of tensors and their files.")
    return places


def _missing_weights_hint(missing: Path) -> str:
    """Explains a missing weight file from other files in the folder."""
    others = sorted(path.name for path in missing.parent.glob("*.safetensors"))
    if missing.name != SINGLE:
        return "its index names it; complete the download"
    if others:
        return f"it has {others[0]}, and no {INDEX} that says what is in which file"
    return "weights are read from safetensors only"


class Tensors:
    """The tensors of a directory by name, read on request. A context manager.

    Attributes:
        unnamed: tensor -> file, for tensors missing from the index.
        strays: tensor files that are not read.

    Raises ValueError: there are no safetensors, a file is missing or damaged, or the index names a missing
    tensor.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = contextlib.ExitStack()
        self._handles: dict[str, Any] = {}
        single = folder / SINGLE
        if (folder / INDEX).exists():
            places = _places(folder)
        else:
            handle = self._handles[single.name] = self._open(single)
            places = dict.fromkeys(handle.keys(), single.name)
        for file in set(places.values()):
            if Path(file).name != file:
                raise ValueError(f"{str(folder / INDEX)!r} names a file outside of its folder: {file!r}.")
        if single.exists() and single.name not in places.values():  # readers disagree on which file counts
            raise ValueError(
                f"{str(folder)!r} has {SINGLE} and an index of other files, {INDEX}: remove the one that is stale."
            )
        for file in set(places.values()) - set(self._handles):
            self._handles[file] = self._open(folder / file)
        self._places: dict[str, str] = places
        self._parts: dict[str, tuple[str, int, int]] = {}  # name -> (fused tensor, first row, end row)
        self._fp4: dict[str, str] = {}  # name -> stored name
        stored_names = {file: set(handle.keys()) for file, handle in self._handles.items()}
        self.unnamed = {
            name: file for file, names in stored_names.items() for name in names if places.get(name) != file
        }
        self.strays = sorted(
            path.name for path in folder.glob("*.safetensors") if path.name not in stored_names
        )
        for name, file in places.items():
            if name not in stored_names[file]:
                raise ValueError(f"{str(folder / file)!r} has no {name}, which its index says it has.")

    def _open(self, path: Path) -> Any:
        if find_file(path.parent, path.name) is None:
            raise ValueError(f"{str(path.parent)!r} has no {path.name}: {_missing_weights_hint(path)}.")
        with as_value_error(
            f"{str(path)!r} is damaged or no safetensors file", ".", (OSError, SafetensorError)
        ):
            return self._files.enter_context(safe_open(path, framework="pt"))

    def __enter__(self) -> Tensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def split_fused(self, fused: Mapping[str, Mapping[str, int]]) -> None:
        """Replace fused tensors by the parts that their rows consist of.

        Args:
            fused: name -> names of the parts in order, with the number of rows of each.

        Raises ValueError: a tensor is missing, or has another number of rows.
        """
        for name, parts in fused.items():
            if name not in self._places:
                raise ValueError(f"{str(self._folder)!r} has no {name}, which its config.json asks for.")
            if (rows := self.shape(name)[0]) != sum(parts.values()):
                raise ValueError(
                    f"{name} has {rows} rows in {str(self._folder)!r}, and its config.json says {sum(parts.values())}."
                )
            start, file = 0, self._places.pop(name)
            for part, count in parts.items():
                self._places[part], self._parts[part] = file, (name, start, start + count)
                start += count

    def view_fp4(self, stored: Mapping[str, str]) -> None:
        """Read matrices with two FP4 codes in each uint8 as float4_e2m1fn_x2, with their shapes in codes.

        Args:
            stored: name of a weight -> name of the stored tensor, which is replaced.
        """
        for name, packed in stored.items():
            self._places[name] = self._places.pop(packed)
            self._fp4[name] = packed

    def names(self) -> Set[str]:
        """Names of all tensors."""
        return self._places.keys()

    def shape(self, name: str) -> list[int]:
        """Shape of a tensor, without reading it."""
        shape = list(self._slice(name).get_shape())
        if name in self._fp4:
            shape[-1] *= E2M1.codes_per_byte
        if name in self._parts:
            _, start, stop = self._parts[name]
            shape[0] = stop - start
        return shape

    def dtype(self, name: str) -> torch.dtype | str:
        """Dtype of a tensor, without reading it; safetensors' name for it if torch has none."""
        if name in self._fp4:
            return E2M1.dtype
        word = self._slice(name).get_dtype()
        return _DTYPES.get(word, word)

    def _slice(self, name: str) -> Any:
        stored = self._parts[name][0] if name in self._parts else self._fp4.get(name, name)
        return self._handles[self._places[name]].get_slice(stored)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._parts:
            _, start, stop = self._parts[name]
            part: torch.Tensor = self._slice(name)[start:stop]
            return part
        if name in self._fp4:
            codes: torch.Tensor = self._handles[self._places[name]].get_tensor(self._fp4[name])
            return codes.view(E2M1.dtype)
        return self._handles[self._places[name]].get_tensor(name)
