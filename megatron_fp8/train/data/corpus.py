"""Tokenises texts and records into Megatron's .bin/.idx files, and checks them.

The default corpus is the source of the Python standard library, which every machine with this package has.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import struct
import sys
import sysconfig
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from ...files.atomic_io import discard, error_text, read_regular, replace_file, sync
from ...files.checkpoint import digest
from ...files.run_lock import LOCK, LockHeld, RunLock
from ...files.strict_json import load_json
from ...files.terminal import printable, warn_user
from .documents import (
    Document,
    DocumentRules,
    UnknownTokens,
    content_digest,
    is_records,
    is_text,
    read_documents,
    unknown_tokens_of,
)
from .tokenizers import Tokenizer

_ABOUT = "corpus.json"
_LAYOUT = 3  # 1 had no digests; 2 could split a character
_PAIR, _MASK = ("corpus.bin", "corpus.idx"), ("corpus_loss.bin", "corpus_loss.idx")
_TEXTS = DocumentRules()
_UNFINISHED = ".unfinished-"
_LOOK_S = 1.0
"""Seconds between two checks of a folder that another process fills."""
_LARGEST_RECORD = 1 << 16
_NOT_CORPUS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_INDEX_HEADER = b"MMIDIDX\x00\x00"
_HEADER_BYTES = 34  # magic 9, version 8, dtype code 1, sequence count 8, document count 8


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/megatron_fp8/data, by default under ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "megatron_fp8" / "data"


def standard_library_files() -> list[Path]:
    """The standard library's .py files without its tests, in an order that depends only on their names.

    They are shuffled by a hash of the name, so that all splits contain similar files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, inner, names in os.walk(root):
        # Skipped: installed packages can have ten times as many files.
        inner[:] = (name for name in inner if name not in _NOT_CORPUS)
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        files += (path for path in paths if path.is_file())
    if not files:
        raise ValueError(f"no Python source under {root}: give text files with --data.paths.")
    return sorted(files, key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())


def is_prefix(path: str) -> bool:
    """Whether `path` is the prefix, or one of the two files, of an existing .bin/.idx pair."""
    return any(Path(prefix_of(path) + ending).exists() for ending in (".bin", ".idx"))


def prefix_of(path: str) -> str:
    """`path` without .bin or .idx."""
    return path[:-4] if path.endswith((".bin", ".idx")) else path


def mask_of(prefix: str) -> str:
    """The prefix of the mask pair, which has for each id whether it has a loss (uint8, 0 or 1)."""
    return f"{prefix}_loss"


def prepare(files: list[Path], tokenizer: Tokenizer, cache_dir: Path, rules: DocumentRules = _TEXTS) -> str:
    """Write `files` as one .bin/.idx pair under `cache_dir` and return its prefix; returns at once if it exists.

    If the rules give a loss to a part of it only, a mask is written beside it (``mask_of``).

    The folder's name is a hash of the tokenizer, the rules and every file's content. One process writes it, and others
    that need the same wait. The pair is valid once its digests exist, which are written last, when
    everything else is on the disk. A pair that differs from its digests is written again, with a warning.

    Raises ValueError if a file is missing, unreadable, or neither text nor records, if all are empty, or if the cache
    cannot be written.
    """
    folder = cache_dir / _content_hash(files, tokenizer, rules)
    if problem := _damage(folder):
        if (
            folder.is_dir() and not (folder / LOCK).exists()
        ):  # with a lock it is being written, or its writer was killed
            warn_user(f"the prepared text in {str(folder)!r} is not used but written again: {problem}.")
        try:
            _write_locked(files, tokenizer, folder, rules)
        except OSError as error:
            if _damage(folder):  # else another run that considered this one dead wrote the same content
                others = isinstance(error, PermissionError) and folder.is_dir()
                remedy = f", or have {str(folder)!r} removed, which another start has begun" if others else ""
                raise ValueError(
                    f"data.cache_dir={str(cache_dir)!r} cannot be written ({error_text(error)}): give another folder"
                    f" with --data.cache_dir{remedy}."
                ) from error
    unknown_tokens_of(_read_record(folder).get("lost")).warn()
    return str(folder / "corpus")


@contextmanager
def _lock_cache(folder: Path) -> Iterator[RunLock]:
    """Context: lock a folder of the cache. Waits as long as another process has the lock."""
    printed: set[str] = set()

    def print_once(text: str) -> None:
        if text not in printed:
            print(printable(f"lock        {text}"), file=sys.stderr, flush=True)
        printed.add(text)

    # Without a job: two runs of one SLURM job may run at the same time, and need the same folder.
    lock = RunLock(folder, "data.cache_dir", environ={})
    while True:
        try:
            lock.take(print_once)
            break
        except LockHeld as held:
            print_once(f"waiting for {held.who}, which makes the same in {str(folder)!r}")
            time.sleep(_LOOK_S)
    try:
        yield lock
    finally:
        lock.release()


def _write_locked(files: list[Path], tokenizer: Tokenizer, folder: Path, rules: DocumentRules) -> None:
    """Write the pair, unless another process has written it while this one waited."""
    with _lock_cache(folder) as lock:
        if not _damage(folder):
            return
        for leftover in folder.glob(f"{_UNFINISHED}*"):  # of a killed process
            discard(leftover)
        unfinished = folder / f"{_UNFINISHED}{uuid.uuid4().hex}"
        unfinished.mkdir()
        try:
            tokens, documents, lost = _write(files, tokenizer, str(unfinished / "corpus"), rules)
            names = sorted(path.name for path in unfinished.iterdir())
            for name in names:
                sync(unfinished / name)
            about = {
                "tokenizer": tokenizer.name,
                "files": len(files),
                "documents": documents,
                "tokens": tokens,
            }
            about["lost"] = dataclasses.asdict(lost)
            about["sha256"] = {name: digest(unfinished / name) for name in names}
            lock.check()
            for name in names:
                (unfinished / name).replace(
                    folder / name
                )  # a run that still reads a damaged file keeps it open
            replace_file(folder / _ABOUT, json.dumps(about, indent=2) + "\n")
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _read_record(folder: Path) -> Any:
    return load_json(read_regular(folder / _ABOUT, _LARGEST_RECORD))


def _damage(folder: Path) -> str:
    """What is wrong with a prepared text; '' if its files match their digests."""
    try:
        digests = _read_record(folder)["sha256"]
        names = (*_PAIR, *(name for name in _MASK if name in digests))
        changed = [name for name in names if digest(folder / name) != digests[name]]
    except (KeyError, TypeError):
        return f"{_ABOUT} has no digests"
    except (OSError, ValueError) as error:
        return f"its digests cannot be compared ({error_text(error)})"
    return f"{changed[0]} is not what was written" if changed else ""


def _content_hash(files: Iterable[Path], tokenizer: Tokenizer, rules: DocumentRules) -> str:
    hasher = hashlib.sha256(f"{tokenizer.name} {rules.piece_bytes} {_LAYOUT}".encode())
    for path in files:
        if is_records(path):  # text files keep the hash of earlier versions
            hasher.update(
                json.dumps([path.suffix.lower(), rules.column, rules.loss, tokenizer.chat]).encode()
            )
        hasher.update(content_digest(path, is_text=is_text(path)))
    return hasher.hexdigest()[:32]


def _write(
    files: Iterable[Path], tokenizer: Tokenizer, prefix: str, rules: DocumentRules
) -> tuple[int, int, UnknownTokens]:
    """Return the numbers of tokens and documents written, and the lost text. Each document gets an end of document."""
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=dtype)
    masks = IndexedDatasetBuilder(mask_of(prefix) + ".bin", dtype=np.uint8) if rules.loss != "all" else None
    tokens, documents, learned, lost = 0, 0, 0, UnknownTokens()
    for path in files:
        for document in read_documents(path, tokenizer, rules):
            ids, mask = _ids(document, tokenizer, lost)
            builder.add_document(ids, [len(ids)])
            if masks is not None:
                masks.add_document(mask, [len(mask)])
            tokens, documents, learned = tokens + len(ids), documents + 1, learned + int(mask.sum())
    builder.finalize(prefix + ".idx")
    if masks is not None:
        masks.finalize(mask_of(prefix) + ".idx")
    if not documents:
        raise ValueError("the files of data.paths are all empty: give files that hold text.")
    if not learned:
        raise ValueError(
            f"data.loss={rules.loss}, and no chat of data.paths has an answer of the assistant: leave it out, or give"
            " chats that have."
        )
    return tokens, documents, lost


def _ids(document: Document, tokenizer: Tokenizer, lost: UnknownTokens) -> tuple[np.ndarray, np.ndarray]:
    """A document's ids, with start and end, and which of them have a loss (uint8): two arrays [n].

    A chat's template may add start and end itself. An end after an answer has a loss, like the answer's last token.
    """
    start, end = np.array(tokenizer.start, np.int64), np.array([tokenizer.eod], np.int64)
    if document.answers is None:
        content_ids = tokenizer.encode(document.text)
        lost.add(document.text, content_ids, tokenizer)
        ids = np.concatenate([start, content_ids, end])
        return ids, np.ones(len(ids), np.uint8)
    ids, mask = tokenizer.encode_with_mask(document.text, document.answers)
    lost.add(document.text, ids, tokenizer)
    if not np.array_equal(ids[: len(start)], start):
        ids, mask = np.concatenate([start, ids]), np.concatenate([np.zeros(len(start), np.uint8), mask])
    if not len(ids) or ids[-1] != tokenizer.eod:
        ids, mask = np.concatenate([ids, end]), np.append(mask, mask[-1:] if len(mask) else np.uint8(0))
    return ids, mask


# ---------------------------------------------------------------------------------- checks


@dataclass(frozen=True)
class IndexedInfo:
    """Content of an .idx: the ids' dtype, and the numbers of tokens and sequences in the .bin."""

    dtype: np.dtype
    tokens: int
    sequences: int


def check_indexed(prefix: str) -> IndexedInfo:
    """Read and check the index of `prefix`, and compare the .bin with it.

    Raises ValueError with the file, the expected value and the actual one.
    """
    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    for path in (index, data):
        if not path.is_file():
            raise ValueError(
                f"data.paths names {prefix!r} but {str(path)!r} is not there: a data set is a .bin and "
                f"its .idx."
            )
    try:
        content = index.read_bytes()
        with data.open("rb"):
            pass  # its ids are read later
    except OSError as error:
        raise ValueError(
            f"data.paths names {prefix!r}, and it cannot be read ({error_text(error)}: {str(error.filename or index)!r}):"
            " make both files readable, or give other data."
        ) from error
    if len(content) < _HEADER_BYTES or content[:9] != _INDEX_HEADER:
        raise corrupt(index, "it does not start like a Megatron index")
    version, code, sequences, documents = struct.unpack("<QBQQ", content[9:_HEADER_BYTES])
    if version != 1 or code not in {member.value for member in DType}:
        raise corrupt(index, f"version {version} with dtype code {code} is not known (version 1 is)")
    expected = _HEADER_BYTES + sequences * (4 + 8) + documents * 8
    if len(content) != expected:
        raise corrupt(
            index,
            f"it says {sequences} sequences and {documents} document ends, which take {expected} bytes, and "
            f"has {len(content)}",
        )
    dtype = np.dtype(DType.dtype_from_code(code))
    if dtype.kind == "f":
        raise corrupt(index, f"its ids are {dtype}, and ids are whole numbers")
    lengths = np.frombuffer(content, np.int32, sequences, _HEADER_BYTES).astype(np.int64)
    pointers = np.frombuffer(content, np.int64, sequences, _HEADER_BYTES + 4 * sequences)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * dtype.itemsize if sequences else pointers
    if (lengths < 0).any() or not np.array_equal(pointers, starts):
        raise corrupt(index, "its sequence lengths and positions disagree")
    ends = np.frombuffer(content, np.int64, documents, _HEADER_BYTES + 12 * sequences)
    if not documents or ends[0] != 0 or ends[-1] != sequences or (np.diff(ends) < 0).any():
        actual = f"go from {ends[0]} to {ends[-1]}" if documents else "there are none"
        raise corrupt(index, f"its document ends must rise from 0 to the {sequences} sequences, and {actual}")
    tokens = int(lengths.sum())
    if data.stat().st_size != tokens * dtype.itemsize:
        raise corrupt(
            data,
            f"its index says {tokens} tokens of {dtype.itemsize} bytes, {tokens * dtype.itemsize} bytes in "
            f"all, and it has {data.stat().st_size}",
        )
    return IndexedInfo(dtype, tokens, sequences)


def fingerprint(prefix: str, *, whole_index: bool = True) -> dict[str, int | str | None]:
    """A fingerprint of a pair: sizes, the index's digest, samples of the ids.

    It has no times, which differ between nodes. None for a missing file. ``whole_index``: False samples the index too,
    which is quick for a pair of any size.
    """
    values: dict[str, int | str | None] = {}
    for ending in (".bin", ".idx"):
        path = Path(prefix + ending)
        values[f"bytes in the {ending}"] = path.stat().st_size if path.is_file() else None
    index = Path(prefix + ".idx")
    if whole_index:
        values["SHA-256 of the .idx"] = digest(index) if index.is_file() else None
    else:
        values["sampled SHA-256 of the .idx"] = sampled_digest(index)
    values["sampled SHA-256 of the .bin"] = sampled_digest(Path(prefix + ".bin"))
    mask = sampled_digest(Path(mask_of(prefix) + ".bin"))
    return values if mask is None else {**values, "sampled SHA-256 of the mask": mask}


def sampled_digest(path: Path) -> str | None:
    """SHA-256 of 64 evenly spread pieces of 4 KiB, the last at the end: all of a small file, little of a large one.

    None if there is no such file.
    """
    if not path.is_file():
        return None
    hasher = hashlib.sha256()
    with path.open("rb") as stream:
        last = max(path.stat().st_size - 4096, 0)
        for start in sorted({last * i // 63 for i in range(64)}):
            stream.seek(start)
            hasher.update(stream.read(4096))
    return hasher.hexdigest()


def corrupt(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{str(path)!r} is corrupt or not Megatron's: {what}. Prepare the data again, or copy it again."
    )


def check_mask(prefix: str) -> None:
    """Raise ValueError unless a pair has a mask beside it, with a value for each id of each document."""
    if not is_prefix(mask_of(prefix)):
        raise ValueError(
            f"data.loss=assistant and {prefix!r}, which has no {mask_of(prefix)}.bin and .idx beside it that say which"
            " ids have a loss: give JSONL or Parquet with messages, or leave data.loss out."
        )
    if check_indexed(mask_of(prefix)).dtype != np.uint8 or not np.array_equal(
        sequence_lengths(mask_of(prefix)), sequence_lengths(prefix)
    ):
        raise corrupt(
            Path(mask_of(prefix) + ".idx"), f"its documents are not those of {prefix!r}, a byte for each id"
        )


def sequence_lengths(prefix: str) -> np.ndarray:
    """Number of tokens of each document of `prefix`: int32 [documents]. Check the index first."""
    content = np.fromfile(prefix + ".idx", dtype=np.uint8)
    (sequences,) = struct.unpack("<Q", content[18:26].tobytes())
    return content[_HEADER_BYTES : _HEADER_BYTES + 4 * sequences].view(np.int32)
