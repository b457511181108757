"""Batches: the order of samples in any layout, resuming at a position, splits that have documents."""

import json
import os
import pickle

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_fp8.files.checkpoint import digest
from megatron_fp8.train.config.run_config import parse
from megatron_fp8.train.config.sections import DataSection, TrainSection
from megatron_fp8.train.data import datasets as data
from megatron_fp8.train.data.corpus import check_mask, mask_of, prepare
from megatron_fp8.train.data.datasets import batches
from megatron_fp8.train.data.indexed_dataset import CorpusChanged, _Files, damage
from megatron_fp8.train.data.tokenizers import ByteTokenizer
from megatron_fp8.train.stop import TrainingFailed


class Numbered:
    """A data set whose sample n holds n."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        sample = torch.full((4,), index)
        return dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"), sample)


@pytest.fixture
def ranks(monkeypatch):
    """Be data-parallel rank `rank` of `size`, without a process group."""

    def be(rank, size):
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda: rank)
        monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: size)
        monkeypatch.setattr(data, "get_batch_on_this_cp_rank", lambda batch: batch)

    return be


def taken(train, count, consumed=0):
    iterator = batches(Numbered(), train, consumed)
    return [next(iterator)["tokens"][:, 0].tolist() for _ in range(count)]


def test_any_layout_gives_a_step_the_same_samples(ranks):
    ranks(0, 1)
    alone = taken(TrainSection(micro_batch_size=2, global_batch_size=4), 2)
    assert alone == [[0, 1], [2, 3]]
    for rank in range(2):
        ranks(rank, 2)
        assert taken(TrainSection(micro_batch_size=2, global_batch_size=4), 1) == [alone[rank]]


def test_a_position_continues_where_it_was(ranks):
    ranks(1, 2)
    train = TrainSection(micro_batch_size=1, global_batch_size=2)
    assert taken(train, 4) == [[1], [3], [5], [7]]
    assert taken(train, 2, consumed=4) == [[5], [7]]


def test_all_samples_used_start_again(ranks):
    ranks(0, 1)
    assert taken(TrainSection(micro_batch_size=4), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


@pytest.mark.parametrize("split", ["1,2", "0,1,1", "a,b,c", "1e-300,1,0"])
def test_splits_that_are_none(split):
    with pytest.raises(ValueError, match=r"data\.split"):
        parse([f"--data.split={split}"])


def test_a_split_must_leave_documents_for_what_is_used(tmp_path):
    files = []
    for number in range(4):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_bytes(b"x" * 20)
    prefix = prepare(files, ByteTokenizer(), tmp_path / "cache")
    data._check_split([prefix], "75,25,0", [8, 8, 0], 16)
    data._check_split([prefix], "100,0,0", [8, 0, 0], 16)
    with pytest.raises(ValueError, match=r"leaves 0 tokens in 0 of 4 documents of .* for validation"):
        data._check_split([prefix], "100,0,0", [8, 8, 0], 16)
    with pytest.raises(ValueError, match=r"leaves 0 tokens in 0 of 4 documents of .* for validation"):
        # Not even asked for: Megatron-Core would not return.
        data._check_split([prefix], "99,1,0", [8, 0, 0], 16)
    with pytest.raises(ValueError, match="a sequence takes 65"):
        data._check_split([prefix], "75,25,0", [8, 8, 0], 64)
    with pytest.raises(
        ValueError, match=r"give more data, or a smaller train\.seq_length\.$"
    ):  # it is all there is
        data._check_split([prefix], "1,0,0", [8, 0, 0], 128)


def write(prefix, documents):
    """A pair under `prefix`: documents of 20 tokens each, which are the document's number."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for number in range(documents):
        builder.add_document(np.full(20, number), [20])
    builder.finalize(f"{prefix}.idx")


def tokens_of(dataset):
    return {int(token) for index in range(len(dataset)) for token in dataset[index]["tokens"]}


@pytest.fixture
def build(monkeypatch, tmp_path):
    """build(prefixes): the training data, of one epoch or more, with a cache of its own."""
    monkeypatch.setattr(data, "on_first_rank", lambda work: work())
    monkeypatch.setattr(data, "wait_for_all", lambda: None)

    def build(*prefixes, seed=1, loss="all", vocab_size=None):
        section = DataSection(split="100,0,0", cache_dir=str(tmp_path / "cache"), loss=loss)
        train = TrainSection(
            train_iters=8, micro_batch_size=1, global_batch_size=8, seq_length=16, eval_iters=0, seed=seed
        )
        return data.build_datasets(list(map(str, prefixes)), section, train, ByteTokenizer(), vocab_size)[0]

    return build


def test_ids_outside_the_vocabulary_are_another_tokenizers(build, tmp_path, monkeypatch):
    """Of a large data set the first are read at the start, the others when they are trained on."""
    prefix = str(tmp_path / "corpus")
    write(prefix, 50)
    data.check_data([prefix], 50)
    with pytest.raises(ValueError, match="token id 49, and the vocabulary has 49 ids"):
        data.check_data([prefix], 49)
    monkeypatch.setattr(data, "_CHECKED_IDS", 100)
    data.check_data([prefix], 5)
    assert len(tokens_of(build(prefix, vocab_size=50))) > 40
    with pytest.raises(TrainingFailed, match=r"holds the token id \d+, and the vocabulary has 5 ids"):
        tokens_of(build(prefix, vocab_size=5))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    builder.add_document(np.arange(-1, 20), [21])
    builder.finalize(f"{prefix}.idx")
    with pytest.raises(ValueError, match="token id -1,"):
        data.check_data([prefix], 50)


def test_sequences_for_calibration_come_from_all_over_the_data(tmp_path):
    prefixes = [str(tmp_path / name) for name in ("one", "two")]
    for prefix in prefixes:
        write(prefix, 3)  # 60 tokens
    found = data.spread_sequences(prefixes, 3, 20, 3)
    assert found.dtype == np.int64 and [set(row) for row in found.tolist()] == [{0}, {2, 0}, {2}]
    with pytest.raises(ValueError, match="has 120 tokens, and a sequence has 121: give more text"):
        data.spread_sequences(prefixes, 1, 121, 3)
    with pytest.raises(ValueError, match="token id 2, and the vocabulary has 2 ids"):
        data.spread_sequences(prefixes, 3, 20, 2)


@pytest.mark.parametrize(
    ("documents", "split", "seq_length", "moved"),
    [
        (200, "96,4,0", 16, "96,4,0"),
        (5, "96,4,0", 16, "0.800000000,0.200000000,0.000000000"),  # 0 of 5 otherwise
        (40, "96,4,0", 50, "0.925000000,0.075000000,0.000000000"),  # 2 documents of 20 tokens are not 51
        (10, "80,0,20", 16, None),  # no validation is asked for
        (1, "96,4,0", 8, None),
    ],
)
def test_a_split_that_leaves_nothing_for_validation_takes_the_last_documents(
    tmp_path, documents, split, seq_length, moved
):
    write(tmp_path / "few", documents)
    given = ([str(tmp_path / "few")], split, [8, 8, 0], seq_length)
    if moved is None:
        with pytest.raises(ValueError, match=r"for (validation|training)"):
            data._split_with_validation(*given)
    elif moved == split:
        assert data._split_with_validation(*given) == split
    else:
        with pytest.warns(UserWarning, match="takes (20|7.5) % of the documents, from the end"):
            assert data._split_with_validation(*given) == moved
        data._check_split(given[0], moved, *given[2:])


def test_a_short_text_is_cut_so_that_there_is_a_validation(monkeypatch, tmp_path):
    size = 20_000
    monkeypatch.setattr(data, "on_first_rank", lambda work, **_: work())
    (tmp_path / "text.txt").write_bytes(b"words and words\n" * (size // 16))
    section = DataSection(paths=[str(tmp_path / "text.txt")], cache_dir=str(tmp_path / "cache"))
    train = TrainSection(eval_iters=1, train_iters=1, seq_length=64)
    with pytest.warns(UserWarning, match=rf"leaves nothing for validation of a text of {size:,} bytes"):
        prefixes = data.find_data(section, ByteTokenizer(), train)
    data._check_split(prefixes, section.split, [8, 8, 0], 64)
    assert data.find_data(section, ByteTokenizer()) != prefixes, "without a validation it is as it was"
    (tmp_path / "empty.txt").touch()
    section.paths.append(str(tmp_path / "empty.txt"))
    with pytest.warns(UserWarning, match=r"data\.paths has empty files, such as '.*empty\.txt'"):
        data.find_data(section, ByteTokenizer())


def masked(prefix, documents):
    """`write`, and a mask that is 1 for the last of each document's 20 tokens."""
    write(prefix, documents)
    builder = IndexedDatasetBuilder(f"{mask_of(str(prefix))}.bin", dtype=np.uint8)
    for _ in range(documents):
        builder.add_document(np.arange(20) == 19, [20])
    builder.finalize(f"{mask_of(str(prefix))}.idx")


def test_a_mask_is_of_the_tokens_that_are_predicted(build, tmp_path):
    masked(tmp_path / "chats", 6)
    dataset = build(tmp_path / "chats", loss="assistant")
    for index in range(len(dataset)):
        sample = dataset[index]
        # The places in the sequence of documents, each 20 tokens: what follows the 19th of a document is its last.
        first, offset = dataset.sample_index[dataset.shuffle_index[index]]
        places = (20 * first + offset + 1 + np.arange(16)) % 20
        assert sample["loss_mask"].tolist() == (places == 19).astype(float).tolist()
        assert torch.equal(sample["labels"][:-1], sample["tokens"][1:])
    plain = build(tmp_path / "chats")
    assert all(torch.equal(plain[n]["tokens"], dataset[n]["tokens"]) for n in range(len(plain)))
    assert plain[0]["loss_mask"].tolist() == [1.0] * 16


def test_a_pair_without_its_mask_or_with_another_ones_is_refused(tmp_path):
    write(tmp_path / "plain", 6)
    with pytest.raises(ValueError, match=r"plain', which has no .*plain_loss\.bin and \.idx"):
        check_mask(str(tmp_path / "plain"))
    masked(tmp_path / "chats", 6)
    check_mask(str(tmp_path / "chats"))
    write(tmp_path / "chats", 7)
    with pytest.raises(ValueError, match=r"chats_loss\.idx' is corrupt .* its documents are not those of"):
        check_mask(str(tmp_path / "chats"))


def test_data_written_anew_under_the_same_prefix_are_read_whole(build, tmp_path):
    """Megatron-Core's own cache would give the first documents only, or an index that is out of bounds."""
    for documents in (6, 40, 6):
        write(tmp_path / "same", documents)
        assert tokens_of(build(tmp_path / "same")) == set(range(documents))


def test_an_index_is_built_once_and_kept_whole(build, tmp_path):
    write(tmp_path / "same", 6)
    build(tmp_path / "same")
    kept = tmp_path / "cache" / "indices"
    (folder,) = kept.iterdir()
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    build(tmp_path / "same")
    assert [*kept.iterdir()] == [folder] and times == {path: path.stat().st_mtime_ns for path in times}
    build(tmp_path / "same", seed=2)
    assert len([*kept.iterdir()]) == 2
    # A run that was killed while it built another one left a part, under another name.
    (kept / ".half").mkdir()
    assert tokens_of(build(tmp_path / "same", seed=3)) == set(range(6))


def test_a_disk_without_room_for_indices_is_named(build, tmp_path, monkeypatch):
    def full(self):
        raise Exception("supply a directory by path_to_cache") from OSError("102368 of 357810 written")

    monkeypatch.setattr(data.BlendedMegatronDatasetBuilder, "build", full)
    write(tmp_path / "same", 6)
    with pytest.raises(
        ValueError, match=r"data\.cache_dir='.*cache'.* \(102368 of 357810 written\): make room"
    ):
        build(tmp_path / "same")


class _Touches:
    """Pickled, it makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def _pickle_in(path, folder):
    path.write_bytes(pickle.dumps(_Touches(folder.parent / "touched")))
    digests = folder / "digests.json"  # whoever can write the file can write what vouches for it
    digests.write_text(json.dumps({**json.loads(digests.read_text()), path.name: digest(path)}))


def _objects_in(path, folder):
    np.save(path, np.array([_Touches(folder.parent / "touched")], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    ("ruin", "words"),
    [
        (lambda path, folder: path.write_bytes(path.read_bytes()[:-1] + b"\x7f"), "is not what was built"),
        (_pickle_in, "no file of plain numbers"),
        (_objects_in, r"no file of plain numbers \(it holds object\)"),
        (lambda path, folder: (path.unlink(), os.mkfifo(path)), "no ordinary file"),
        (lambda path, folder: np.save(folder / "more.npy", np.zeros(2)), "not those that were built"),
        (lambda path, folder: (folder / "digests.json").unlink(), "cannot be read"),
    ],
    ids=["edited", "a pickle", "objects", "a pipe", "a file more", "no digests"],
)
def test_kept_indices_that_are_not_what_was_built_are_built_again(build, tmp_path, ruin, words):
    """Megatron-Core would unpickle them, or take what is in them for places in the data."""
    write(tmp_path / "same", 6)
    build(tmp_path / "same")
    (folder,) = (tmp_path / "cache" / "indices").iterdir()
    ruin(next(folder.glob("*train-sample_index.npy")), folder)
    with pytest.warns(UserWarning, match=words):
        assert tokens_of(build(tmp_path / "same")) == set(range(6))
    assert [*folder.parent.iterdir()] == [folder] and damage(folder) == ""


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(build, tmp_path, ending):
    write(tmp_path / "cut", 500)
    dataset = build(tmp_path / "cut")
    dataset[0]
    os.truncate(tmp_path / f"cut{ending}", 100)
    with pytest.raises(CorpusChanged, match=rf"cut{ending}' had \d+ bytes .* has 100 now"):
        dataset[1]


def test_other_bytes_in_the_same_size_are_an_error(build, tmp_path):
    write(tmp_path / "same", 500)
    dataset = build(tmp_path / "same")
    dataset[0]
    path = tmp_path / "same.bin"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    with path.open("r+b") as stream:
        stream.write(content)
    os.utime(path, ns=(1, 1))
    with pytest.raises(CorpusChanged, match=r"same.bin' holds other bytes than when training started"):
        dataset[1]


def test_a_file_that_was_only_touched_is_said_once_and_read_on(build, tmp_path):
    write(tmp_path / "touched", 500)
    dataset = build(tmp_path / "touched")
    before = dataset[1]["tokens"].tolist()
    os.utime(tmp_path / "touched.bin", ns=(1, 1))
    with pytest.warns(UserWarning, match=r"touched.bin' was written since .* as they were") as said:
        assert dataset[1]["tokens"].tolist() == before
        dataset[0]
    assert len(said) == 1


def test_a_read_past_the_end_never_gives_what_was_not_there(tmp_path):
    write(tmp_path / "few", 2)
    files = _Files(str(tmp_path / "few"))
    assert files.read(np.uint16, 3, 34).tolist() == [0, 0, 0][:3] and files.read(np.uint16, 0, 0).size == 0
    with pytest.raises(CorpusChanged, match="ends before byte 82"):
        files.read(np.uint16, 2, 78)
