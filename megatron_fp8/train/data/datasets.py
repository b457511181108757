"""From a data section to batches: Megatron-Core's GPTDataset, in an order that any layout shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.utils import get_batch_on_this_cp_rank

from ...files.disk import in_words, remedy
from ...state.ranks import own_device
from ..config.sections import DataSection, TrainSection
from ..launch.parallel import on_first_rank, wait_for_all
from ..left_out import Range, place
from . import corpus
from .bigram import bigram_entropy
from .ids import check_ids
from .index_cache import index_folder, index_name, keep_indices
from .indexed import CorpusDataset
from .texts import look_at
from .tokenizers import ByteTokenizer, Tokenizer

_SPLITS = ("training", "validation", "test")


def cache_dir(section: DataSection) -> Path:
    """Where prepared text and Megatron's sample indices are kept."""
    return Path(section.cache_dir) if section.cache_dir else corpus.default_cache_dir()


def check_tokenizer(section: DataSection, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError if text would be cut into bytes for a model whose vocabulary was made for another tokenizer.

    Args:
        vocab_size: ids that were asked for, 0 if the tokenizer's. Data that is prepared already holds the right ids.
    """
    is_text = not section.paths or any(not corpus.is_prefix(path) for path in section.paths)
    if is_text and isinstance(tokenizer, ByteTokenizer) and vocab_size > _VOCABULARY_FOR_BYTES:
        what = "data.paths" if section.paths else "the Python standard library's source (no data was given)"
        raise ValueError(
            f"model.vocab_size={vocab_size} and no data.tokenizer: the model would learn the bytes of {what}, and use"
            f" {tokenizer.vocab_size} of its ids. Give --data FILE... and --data.tokenizer=tokenizer.json, or prefixes of"
            " prepared .bin/.idx pairs; or, to train on bytes, leave model.vocab_size out."
        )


_VOCABULARY_FOR_BYTES = 1024


def find_data(section: DataSection, tokenizer: Tokenizer) -> list[str]:
    """Prefixes of the .bin/.idx pairs to train on; text is prepared by rank 0 while the others wait, however long.

    Collective. Raises ValueError on every rank: a path is missing, a pair is corrupt.
    """

    def prepare() -> list[str]:
        prefixes = [corpus.prefix_of(path) for path in section.paths if corpus.is_prefix(path)]
        texts = [Path(path) for path in section.paths if not corpus.is_prefix(path)]
        for prefix in prefixes:
            corpus.check_indexed(prefix)
        look_at(texts)
        if texts or not prefixes:
            prefixes.append(
                corpus.prepare(texts or corpus.standard_library_files(), tokenizer, cache_dir(section))
            )
        return prefixes

    return on_first_rank(prepare, beat_s=_BEAT_S)


_BEAT_S = 20.0


def check_data(prefixes: list[str], section: DataSection, vocab_size: int) -> None:
    """ValueError, on every rank, if an id of the data is outside the vocabulary. Collective; every rank reads a part."""
    check_ids(prefixes, vocab_size, cache_dir(section) / "ids")


def build_datasets(
    prefixes: list[str], section: DataSection, train: TrainSection, tokenizer: Tokenizer
) -> list[Any]:
    """Training, validation and test `GPTDataset`s (None where the split gives none).

    Raises ValueError if the split leaves a data set that is needed without documents.
    """
    evaluated = train.eval_iters * train.global_batch_size
    sizes = [train.train_iters * train.global_batch_size, evaluated, 0]
    kept = cache_dir(section) / "indices"

    def find() -> tuple[str, Path]:
        _check_split(prefixes, section.split, sizes, train.seq_length)
        name = index_name(prefixes, [sizes, section.split, train.seed, train.seq_length, tokenizer.name])
        return name, index_folder(kept, name)

    name, folder = on_first_rank(find)  # which reads every index; of many ranks one does
    config = GPTDatasetConfig(
        random_seed=train.seed,
        sequence_length=train.seq_length,
        blend=(prefixes, None),
        split=section.split,
        path_to_cache=str(folder),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # the attention is causal by itself
    )
    try:
        built = BlendedMegatronDatasetBuilder(CorpusDataset, sizes, lambda: True, config).build()
    except Exception as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise ValueError(  # Megatron-Core speaks of an option of its own
            f"data.cache_dir={str(kept.parent)!r}: the indices of samples cannot be written"
            f" ({in_words(error.__cause__)}): {remedy(error.__cause__)}, or give another folder with --data.cache_dir."
        ) from error
    wait_for_all()  # the others open the files after rank 0 has written them
    on_first_rank(lambda: keep_indices(folder, kept / name))
    return built


def _check_split(prefixes: list[str], split: str, sizes: list[int], seq_length: int) -> None:
    ends = np.cumsum([0, *parse_and_normalize_split(split)])
    for prefix in prefixes:
        index = corpus.check_indexed(prefix)
        lengths = corpus.sequence_lengths(prefix)
        for part, (name, size) in enumerate(zip(_SPLITS, sizes, strict=True)):
            first, last = (round(float(end) * index.sequences) for end in ends[part : part + 2])
            tokens = int(lengths[first:last].sum())
            # Of an empty part Megatron-Core would count epochs for ever.
            empty = tokens == 0 and ends[part] < ends[part + 1]
            if empty or (size and tokens <= seq_length):
                all_of_it = ends[part] == 0 and ends[part + 1] == 1
                remedies = (
                    "give more data, or a smaller train.seq_length"
                    if all_of_it
                    else "give more data, another split, or, to train without validation, train.eval_iters=0 with"
                    " data.split=1,0,0"
                )
                raise ValueError(
                    f"data.split={split!r} leaves {tokens} tokens in {last - first} of {index.sequences} "
                    f"documents of {prefix!r} for {name}, and a sequence takes {seq_length + 1}: {remedies}."
                )


def corpus_bigram_entropy(prefixes: list[str], most: int = 2**25) -> float:
    """The bigram entropy, in nats, of the data of `prefixes` put one after the other, of its first `most` tokens.

    More would not change the figure that is shown, and a large corpus does not fit into memory.
    """
    parts: list[np.ndarray] = []
    for prefix in prefixes:
        room = most - sum(map(len, parts))
        file, dtype = Path(prefix + ".bin"), corpus.check_indexed(prefix).dtype
        # NumPy takes memory for all that it is asked for, and gives back what the file has not.
        parts.append(np.fromfile(file, dtype=dtype, count=min(room, file.stat().st_size // dtype.itemsize)))
    return bigram_entropy(parts[0] if len(parts) == 1 else np.concatenate(parts))


def batches(
    dataset: Any, train: TrainSection, consumed_samples: int = 0, left_out: Sequence[Range] = ()
) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches of this rank, starting at `consumed_samples`; starts again from the first when all are used.

    Sample order depends on the position only: a step's micro-batches hold together, over all data-parallel ranks, the
    samples that any other layout gives to the same step. Tensors are [micro batch, this rank's part of the sequence].
    ``left_out``: ranges of samples that are passed over, and not counted as consumed.
    """
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    device = own_device()
    position = consumed_samples
    while True:
        first = position + rank * train.micro_batch_size
        kept = range(first, first + train.micro_batch_size)
        samples = [dataset[place(index, left_out) % len(dataset)] for index in kept]
        batch = {
            name: _moved(torch.stack([sample[name] for sample in samples]), device)
            for name in ("tokens", "labels", "loss_mask", "position_ids")
        }
        position += ranks * train.micro_batch_size
        yield get_batch_on_this_cp_rank(batch)


def _moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x on the device. From pinned memory, as other copies wait until the GPU has done all that it was given before."""
    return x.to(device) if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)
