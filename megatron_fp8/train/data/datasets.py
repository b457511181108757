"""Builds Megatron-Core's GPTDatasets and batches, in one order for all layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.utils import get_batch_on_this_cp_rank

from ...files.atomic_io import as_value_error, error_text, remedy
from ...files.terminal import warn_user
from ...state.collectives import own_device
from ..config.sections import DataSection, TrainSection
from ..health.skipped_samples import Range, sample_position
from ..launch.parallel import on_first_rank, wait_for_all
from . import corpus
from .documents import PIECE_BYTES, DocumentRules, files_of
from .indexed_dataset import (
    CorpusConfig,
    CorpusDataset,
    MaskedDataset,
    check_ids,
    index_folder,
    index_name,
    keep_indices,
)
from .tokenizers import ByteTokenizer, Tokenizer

_SPLITS = ("training", "validation", "test")


def cache_dir(section: DataSection) -> Path:
    """The folder of prepared text and of Megatron's sample indices."""
    return Path(section.cache_dir) if section.cache_dir else corpus.default_cache_dir()


def check_tokenizer(section: DataSection, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError if text would be split into bytes for a model whose vocabulary is for another tokenizer.

    Args:
        vocab_size: configured number of ids, 0 if the tokenizer decides. Prepared data already has the right ids.
    """
    default_bytes = isinstance(tokenizer, ByteTokenizer) and section.tokenizer is None
    if default_bytes and vocab_size > _VOCABULARY_FOR_BYTES and holds_text(section):
        what = "data.paths" if section.paths else "the Python standard library's source (no data was given)"
        raise ValueError(
            f"model.vocab_size={vocab_size} and no data.tokenizer: the model would learn the bytes of {what}, and use"
            f" {tokenizer.vocab_size} of its ids. Give --data FILE... and --data.tokenizer=tokenizer.json (`megatron-fp8"
            " tokenizer` trains one on your text), or prefixes of prepared .bin/.idx pairs; or, to train on bytes, say"
            " --data.tokenizer=bytes."
        )


_VOCABULARY_FOR_BYTES = 1024


def holds_text(section: DataSection) -> bool:
    """Whether some of the data is text and not tokens."""
    return not section.paths or any(not corpus.is_prefix(str(path)) for path in _files(section))


def _files(section: DataSection) -> list[Path]:
    """The files of data.paths, including those in its folders, and prefixes of pairs."""
    return [
        file
        for path in section.paths
        for file in ([Path(path)] if corpus.is_prefix(path) else files_of(Path(path)))
    ]


def find_data(section: DataSection, tokenizer: Tokenizer, train: TrainSection | None = None) -> list[str]:
    """Prefixes of the .bin/.idx pairs to train on. Rank 0 prepares text while the others wait, however long it takes.

    Collective. If a text is so short that its pieces leave nothing for validation, it is split into smaller pieces.

    Args:
        train: the train section; None: read all data, without validation.

    Raises ValueError on every rank if a path is missing or is not text, or if a pair is corrupt.
    """

    def prepare() -> list[str]:
        paths = _files(section)
        prefixes = [corpus.prefix_of(str(path)) for path in paths if corpus.is_prefix(str(path))]
        files = [path for path in paths if not corpus.is_prefix(str(path))]
        for prefix in prefixes:
            corpus.check_indexed(prefix)
            if section.loss != "all":
                corpus.check_mask(prefix)
        if empty := [path for path in files if path.is_file() and not path.stat().st_size][: len(files) - 1]:
            warn_user(f"data.paths has empty files, such as {str(empty[0])!r}.")
        if files or not prefixes:
            files = files or corpus.standard_library_files()
            rules = DocumentRules(section.column, section.loss)
            prefix = corpus.prepare(files, tokenizer, cache_dir(section), rules)
            if train is not None and _lacks_validation(prefix, section, train):
                size = sum(path.stat().st_size for path in files)
                rules = replace(rules, piece_bytes=max(size // _PIECES, _LEAST_PIECE))
                warn_user(
                    f"data.split={section.split!r} leaves nothing for validation of a text of {size:,} bytes in pieces of"
                    f" {PIECE_BYTES:,}: it is cut into pieces of {rules.piece_bytes:,}, and validation takes its end."
                )
                prefix = corpus.prepare(files, tokenizer, cache_dir(section), rules)
            prefixes.append(prefix)
        return prefixes

    return on_first_rank(prepare, beat_s=_BEAT_S)


_PIECES, _LEAST_PIECE = 64, 512
"""Number of documents of a short text, and least bytes of one."""


_BEAT_S = 20.0


def check_data(prefixes: list[str], vocab_size: int) -> None:
    """Raise ValueError on every rank if a data set is empty, or one of its first ids is outside the vocabulary.

    Collective. The ids after those are checked when they are read. A wrong tokenizer shows at once.
    """

    def check() -> None:
        for prefix in prefixes:
            info, path = corpus.check_indexed(prefix), prefix + ".bin"
            if not info.tokens:
                raise ValueError(f"{prefix!r} holds no tokens: give data that is not empty.")
            with as_value_error(f"{path!r} cannot be read", ""):
                ids = np.fromfile(path, info.dtype, min(_CHECKED_IDS, info.tokens))
            check_ids(ids, vocab_size, prefix)

    on_first_rank(check)


_CHECKED_IDS = 1 << 24


def spread_sequences(prefixes: list[str], count: int, length: int, vocab_size: int) -> np.ndarray:
    """int64 [count, length]: sequences from evenly spaced positions of the data, always the same ones.

    Raises ValueError if the data is shorter than one, or has an id outside the vocabulary.
    """
    parts = [np.memmap(p + ".bin", dtype=corpus.check_indexed(p).dtype, mode="r") for p in prefixes]
    tokens = np.concatenate(parts) if len(parts) > 1 else parts[0]
    names = ", ".join(prefixes)
    if len(tokens) < length:
        raise ValueError(f"{names} has {len(tokens)} tokens, and a sequence has {length}: give more text")
    starts = np.linspace(0, len(tokens) - length, count).astype(np.int64)
    rows = np.stack([tokens[start : start + length] for start in starts]).astype(np.int64)
    check_ids(rows, vocab_size, names)
    return rows


def build_datasets(
    prefixes: list[str],
    section: DataSection,
    train: TrainSection,
    tokenizer: Tokenizer,
    vocab_size: int | None = None,
) -> list[Any]:
    """Training, validation and test `GPTDataset`s; None where the split gives none.

    Args:
        vocab_size: an id outside of it ends the training when it is read; None: none does.

    Raises ValueError if the split leaves a required data set without documents.
    """
    cache = cache_dir(section) / "indices"
    sizes, partly = _sizes(train), section.loss != "all"

    def find() -> tuple[str, str, Path]:
        split = _split_with_validation(prefixes, section.split, sizes, train.seq_length)
        settings = [sizes, split, train.seed, train.seq_length, tokenizer.name]
        name = index_name(prefixes, [*settings, section.loss] if partly else settings)
        return split, name, index_folder(cache, name)

    split, name, folder = on_first_rank(find)  # reads every index, so on one rank only
    config = CorpusConfig(
        random_seed=train.seed,
        sequence_length=train.seq_length,
        blend=(prefixes, None),
        split=split,
        path_to_cache=str(folder),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # attention is causal anyway
        vocab_size=vocab_size,
    )
    try:
        kind = MaskedDataset if partly else CorpusDataset
        built = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()
    except Exception as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise ValueError(  # Megatron-Core names its own option
            f"data.cache_dir={str(cache.parent)!r}: the indices of samples cannot be written"
            f" ({error_text(error.__cause__)}): {remedy(error.__cause__)}, or give another folder with --data.cache_dir."
        ) from error
    wait_for_all()  # the other ranks open the files after rank 0 has written them
    on_first_rank(lambda: keep_indices(folder, cache / name))
    return built


def _sizes(train: TrainSection) -> list[int]:
    """Numbers of samples read from training, validation and test data."""
    return [train.train_iters * train.global_batch_size, train.eval_iters * train.global_batch_size, 0]


def _split_with_validation(prefixes: list[str], split: str, sizes: list[int], seq_length: int) -> str:
    """The split, or one that moves the last training documents to validation, if that would have too little.

    Moves as few documents as possible, with a warning. Raises ValueError if no split works.
    """
    try:
        _check_split(prefixes, split, sizes, seq_length)
        return split
    except _NoValidation:
        ends = [float(end) for end in np.cumsum([0, *parse_and_normalize_split(split)])]
        border = min(_validation_start(prefix, ends, sizes[1], seq_length) for prefix in prefixes)
        new_split = ",".join(f"{part:.9f}" for part in (border, ends[2] - border, ends[3] - ends[2]))
        try:
            _check_split(prefixes, new_split, sizes, seq_length)
        except ValueError:
            new_split = ""
        if not new_split or ends[1] == ends[2] or not border:
            raise
    warn_user(
        f"data.split={split!r} leaves too little for validation, which takes {100 * (ends[2] - border):.3g} % of the"
        " documents, from the end of the training's."
    )
    return new_split


def _validation_start(prefix: str, ends: list[float], size: int, seq_length: int) -> float:
    """Fraction of documents before validation, if that is to have enough tokens; at most the old one."""
    lengths = corpus.sequence_lengths(prefix)
    first, last = (round(end * len(lengths)) for end in ends[1:3])
    least = seq_length + 1 if size else 1
    enough = np.flatnonzero(np.cumsum(lengths[:last][::-1]) >= least)
    return min(first, last - int(enough[0]) - 1 if len(enough) else 0) / max(len(lengths), 1)


def _lacks_validation(prefix: str, section: DataSection, train: TrainSection) -> bool:
    """Whether the split leaves too little of a data set for its validation."""
    weights = parse_and_normalize_split(section.split)
    try:
        _check_split([prefix], section.split, _sizes(train), train.seq_length)
    except _NoValidation:
        return weights[1] > 0
    except ValueError:  # build_datasets reports it
        return False
    return False


class _NoValidation(ValueError):
    """The split leaves too little for validation."""


def _check_split(prefixes: list[str], split: str, sizes: list[int], seq_length: int) -> None:
    ends = np.cumsum([0, *parse_and_normalize_split(split)])
    for prefix in prefixes:
        index = corpus.check_indexed(prefix)
        lengths = corpus.sequence_lengths(prefix)
        for part, (name, size) in enumerate(zip(_SPLITS, sizes, strict=True)):
            first, last = (round(float(end) * index.sequences) for end in ends[part : part + 2])
            tokens = int(lengths[first:last].sum())
            # Megatron-Core counts epochs of an empty part for ever.
            empty = tokens == 0 and ends[part] < ends[part + 1]
            if empty or (size and tokens <= seq_length):
                all_of_it = ends[part] == 0 and ends[part + 1] == 1
                remedies = (
                    "give more data, or a smaller train.seq_length"
                    if all_of_it
                    else "give more data, another split, or, to train without validation, train.eval_iters=0 with"
                    " data.split=1,0,0"
                )
                kind = _NoValidation if name == "validation" else ValueError
                raise kind(
                    f"data.split={split!r} leaves {tokens} tokens in {last - first} of {index.sequences} "
                    f"documents of {prefix!r} for {name}, and a sequence takes {seq_length + 1}: {remedies}."
                )


def batches(
    dataset: Any, train: TrainSection, consumed_samples: int = 0, left_out: Sequence[Range] = ()
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield micro-batches of this rank from `consumed_samples` on; after the last sample the first follows.

    Sample order depends on the position only: over all data-parallel ranks, a step's micro-batches contain the same
    samples in every layout. Tensors are [micro batch, this rank's part of the sequence]. ``left_out``: ranges of
    samples that are skipped, and do not count as consumed.
    """
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    device = own_device()
    position = consumed_samples
    while True:
        first = position + rank * train.micro_batch_size
        indices = range(first, first + train.micro_batch_size)
        samples = [dataset[sample_position(index, left_out) % len(dataset)] for index in indices]
        batch = {
            name: _to_device(torch.stack([sample[name] for sample in samples]), device)
            for name in ("tokens", "labels", "loss_mask", "position_ids")
        }
        position += ranks * train.micro_batch_size
        yield get_batch_on_this_cp_rank(batch)


def _to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x on the device, copied from pinned memory: other copies wait for all queued work of the GPU."""
    return x.to(device) if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)
