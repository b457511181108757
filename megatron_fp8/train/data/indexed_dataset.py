"""Reads .bin/.idx pairs that may change, and caches Megatron-Core's sample indices of them.

Megatron-Core maps both files into memory: a read past the end of a file that has become shorter ends the process by
SIGBUS, without a message. Here the .bin is read by `pread`, which returns how much there was, and before each sample
both files must have their initial sizes. That takes 3 microseconds a document. If a file's time has changed, samples of
its content are compared: other content ends the run, the same content causes a warning.

Every id that is read is compared with the vocabulary. Megatron-Core's embedding would take one outside of it as a zero
vector under tensor parallelism.

    cache/indices/NAME/             NAME is a digest of all inputs
        ...-document_index.npy, ... Megatron-Core's sample indices
        digests.json                SHA-256 of each of them

Megatron-Core opens the indices by `numpy.load(allow_pickle=True)`, which executes pickles, and uses any numbers in them
as positions in the data. In a folder that others can write to, or after a power failure, the content may be anything. So
they are used only if they are what was built.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core
import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, _BinReader

from ...files.atomic_io import as_value_error, discard, error_text, read_regular, require_regular, write_file
from ...files.checkpoint import digest
from ...files.strict_json import load_json
from ...files.terminal import warn_user
from ..stop import TrainingFailed
from .corpus import check_indexed, fingerprint, mask_of, sampled_digest

_DIGESTS, _LARGEST = "digests.json", 1 << 20
_LAYOUT = 2  # 1 had no digests


@dataclass
class CorpusConfig(GPTDatasetConfig):
    """Megatron-Core's, with the model's ``vocab_size``; None: ids are not compared with it."""

    vocab_size: int | None = None


def check_ids(ids: np.ndarray, vocab_size: int, prefix: str) -> None:
    """Raise ValueError if one of ``ids``, of any shape, from the pair ``prefix``, is not in [0, vocab_size)."""
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise ValueError(
            f"{prefix!r} holds the token id {wrong}, and the vocabulary has {vocab_size} ids (0 to {vocab_size - 1}):"
            " give the tokenizer that made the data (--data.tokenizer), or --model.vocab_size."
        )


class CorpusChanged(TrainingFailed):
    """A data set's file has changed since it was opened."""


class _Files(_BinReader):
    """The open files of a .bin/.idx pair."""

    def __init__(self, prefix: str) -> None:
        self._handles: dict[str, int] = {}
        for ending in (".bin", ".idx"):
            self._handles[prefix + ending] = os.open(prefix + ending, os.O_RDONLY)
        statuses = {path: os.fstat(handle) for path, handle in self._handles.items()}
        self._sizes = {path: status.st_size for path, status in statuses.items()}
        self._times = {path: status.st_mtime_ns for path, status in statuses.items()}
        self._digests = {path: sampled_digest(Path(path)) for path in self._handles}
        self._data = prefix + ".bin"

    def check(self) -> None:
        """Raise CorpusChanged if a file's size or content has changed."""
        for path, handle in self._handles.items():
            status = os.fstat(handle)
            size = status.st_size
            if status.st_mtime_ns != self._times[path] and size == self._sizes[path]:
                self._times[path] = status.st_mtime_ns
                self._compare(path)
            if size != self._sizes[path]:
                raise CorpusChanged(
                    f"{path!r} had {self._sizes[path]} bytes when training started and has {size} now: the data "
                    "changed while it was read. Restore it and resume from the last checkpoint."
                )

    def _compare(self, path: str) -> None:
        """Raise CorpusChanged if a rewritten file of the same size differs in samples of its bytes."""
        if sampled_digest(Path(path)) != self._digests[path]:
            raise CorpusChanged(
                f"{path!r} holds other bytes than when training started: the data changed while it was read. Restore it"
                " and resume from the last checkpoint."
            )
        warn_user(f"{path!r} was written since training started; samples of it are as they were.")

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """`count` ids of `dtype` from byte `offset` on: [count]. Raises CorpusChanged if the file ends earlier."""
        size = int(count) * np.dtype(dtype).itemsize
        content = bytearray()
        while len(content) < size:
            part = os.pread(self._handles[self._data], size - len(content), int(offset) + len(content))
            if not part:
                self.check()
                raise CorpusChanged(
                    f"{self._data!r} ends before byte {int(offset) + size}, where ids should be."
                )
            content += part
        return np.frombuffer(content, dtype=dtype)

    def __del__(self) -> None:
        for handle in self._handles.values():
            os.close(handle)


class CheckedIndexedDataset(IndexedDataset):
    """Megatron-Core's IndexedDataset over `_Files`."""

    vocab_size: int | None = None

    def initialize(self, path_prefix: str, multimodal: bool, mmap: bool, *more: Any) -> None:
        super().initialize(path_prefix, multimodal, False, *more)
        self.bin_reader: _Files = _Files(path_prefix)

    def __getitem__(self, idx: Any) -> Any:
        self.bin_reader.check()
        return self._checked(super().__getitem__(idx))

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        self.bin_reader.check()  # before the mapped index is read
        return self._checked(super().get(idx, offset, length))

    def _checked(self, ids: Any) -> Any:
        if self.vocab_size is not None:
            try:
                check_ids(ids, self.vocab_size, self.path_prefix)
            except ValueError as error:
                raise TrainingFailed(str(error)) from error
        return ids


class CorpusDataset(GPTDataset):
    """Megatron-Core's GPTDataset over pairs that are checked at each read."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:
        dataset = CheckedIndexedDataset(dataset_path)
        if isinstance(config, CorpusConfig):
            dataset.vocab_size = config.vocab_size
        return dataset


class MaskedDataset(CorpusDataset):
    """Pairs with a mask that selects the ids with a loss (corpus.mask_of)."""

    def __init__(self, indexed_dataset: IndexedDataset, dataset_path: str, *more: Any) -> None:
        super().__init__(indexed_dataset, dataset_path, *more)
        self._mask = copy.copy(self)  # the same samples of the mask's values
        self._mask.dataset = CheckedIndexedDataset(mask_of(dataset_path))

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """As GPTDataset's; ``loss_mask`` [sequence] is 1 where the label (the next id) has a loss."""
        sample = super().__getitem__(idx)
        values, _ = self._mask._query_document_sample_shuffle_indices(0 if idx is None else idx)
        sample["loss_mask"] = sample["loss_mask"] * torch.from_numpy(values[1:] == 1)
        return sample


# ------------------------------------------------------------------------------------------ sample indices


def index_name(prefixes: list[str], settings: list[Any]) -> str:
    """A digest of all inputs of Megatron-Core's sample indices.

    Megatron-Core's own key has the data's paths and the settings, so it would not notice a rewritten file.
    """
    fingerprints = [[prefix, fingerprint(prefix)] for prefix in prefixes]
    text = json.dumps([_LAYOUT, megatron.core.__version__, fingerprints, settings])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def index_folder(kept: Path, name: str) -> Path:
    """The folder of these indices if it is valid, else a new folder to build them in."""
    cached = kept / name
    if cached.is_dir():
        if not (problem := damage(cached)):
            return cached
        warn_user(f"the indices of samples in {str(cached)!r} are not used but built again: {problem}.")
    with as_value_error(
        f"data.cache_dir={str(kept.parent)!r} cannot be written",
        ": give another folder with --data.cache_dir.",
    ):
        folder = kept / f".{name}.{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
    return folder


def keep_indices(built: Path, folder: Path) -> None:
    """Rename complete indices to their final name: a folder with that name is always complete."""
    if built == folder:
        return
    with suppress(OSError):  # no space, or another run was faster; this run keeps its files open
        write_file(
            built / _DIGESTS, json.dumps({path.name: digest(path) for path in sorted(built.iterdir())})
        )
        if not folder.is_dir() or damage(folder):
            discard(folder)
        built.rename(folder)


def damage(folder: Path) -> str:
    """What is wrong with cached indices; '' if they are complete, unchanged and plain numbers."""
    try:
        digests = load_json(read_regular(folder / _DIGESTS, _LARGEST))
        names = {path.name for path in folder.iterdir()} - {_DIGESTS}
        if not isinstance(digests, dict) or names != set(digests):
            return "its files are not those that were built"
    except (OSError, ValueError) as error:
        return f"{_DIGESTS} cannot be read ({error_text(error)})"
    for name in sorted(names):
        path = folder / name
        try:
            require_regular(path.lstat())
            if path.suffix == ".npy":
                _check_plain(path)
            if digest(path) != digests[name]:
                return f"{name} is not what was built"
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            return f"{name} is no file of plain numbers ({error_text(error)})"
    return ""


def _check_plain(path: Path) -> None:
    """Raise ValueError unless a file is NumPy's format, with integers and the declared length."""
    with path.open("rb") as stream:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"its format is {version}")
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        expected = stream.tell() + math.prod(shape) * dtype.itemsize
        size = path.stat().st_size
    if dtype.kind not in "iu":
        raise ValueError(f"it holds {dtype}")
    if size != expected:
        raise ValueError(f"it has {size} bytes and should have {expected}")


# ------------------------------------------------------------------------------------------ bigram entropy
# A bound for models with one token of context: a loss below it shows that the model uses more than the last token.

_TABLE = 1 << 10  # largest vocabulary whose pairs are counted in a table: 8 MiB
_PIECE = 1 << 20  # tokens counted at once


def bigram_entropy(tokens: np.ndarray) -> float:
    """H(next token | token) in nats, from the counts of neighbouring pairs in `tokens` [n], any integer dtype.

    0.0 when there are fewer than two tokens.
    """
    if len(tokens) < 2:
        return 0.0
    width = int(tokens.max()) + 1
    pairs, singles = (_by_table if width <= _TABLE else _by_sort)(tokens, width)
    # H(b | a) = H(a, b) - H(a), with p log p summed over counts and the common total factored out.
    return float((_sum_n_log_n(singles) - _sum_n_log_n(pairs)) / (len(tokens) - 1))


def _by_table(tokens: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts of each pair and of each first token, from a table of all pairs, without a sort."""
    table = np.zeros(width * width, np.int64)
    for start in range(0, len(tokens) - 1, _PIECE):
        piece = tokens[start : start + _PIECE + 1].astype(np.int64)
        table += np.bincount(piece[:-1] * width + piece[1:], minlength=len(table))
    singles = table.reshape(width, width).sum(1)
    return table[table > 0], singles[singles > 0]


def _by_sort(tokens: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The same counts, for vocabularies whose table would be larger than the data."""
    first = tokens[:-1].astype(np.int64)
    _, pairs = np.unique(first * width + tokens[1:], return_counts=True)
    return pairs, np.unique(first, return_counts=True)[1]


def _sum_n_log_n(counts: np.ndarray) -> float:
    counts = counts.astype(np.float64)
    return float((counts * np.log(counts)).sum())


def corpus_bigram_entropy(prefixes: list[str], most: int = 2**25) -> float:
    """Bigram entropy, in nats, of the first `most` tokens of the data of `prefixes`, joined in order.

    More tokens would not change the printed figure, and a large corpus does not fit into memory.
    """
    parts: list[np.ndarray] = []
    for prefix in prefixes:
        room = most - sum(map(len, parts))
        file, dtype = Path(prefix + ".bin"), check_indexed(prefix).dtype
        # NumPy allocates `count` values, even if the file has fewer.
        parts.append(np.fromfile(file, dtype=dtype, count=min(room, file.stat().st_size // dtype.itemsize)))
    return bigram_entropy(parts[0] if len(parts) == 1 else np.concatenate(parts))
