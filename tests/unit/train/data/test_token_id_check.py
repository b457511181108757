"""Ids are looked at by all ranks, once for each content of the data, and what was read is kept."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_fp8.train.data import corpus, token_id_check

PART = 1000


def write(prefix, values):
    builder = corpus.IndexedDatasetBuilder(prefix + ".bin", dtype=np.int32)
    builder.add_document(values, [len(values)])
    builder.finalize(prefix + ".idx")


def test_ids_outside_the_vocabulary_are_another_tokenizers(alone, tmp_path):
    prefix = str(tmp_path / "data")
    write(prefix, np.arange(257, dtype=np.int32))
    token_id_check.check_ids([prefix], 257, tmp_path / "ids")
    with pytest.raises(ValueError, match="token id 256, and the vocabulary has 256"):
        token_id_check.check_ids([prefix], 256, tmp_path / "ids")
    write(prefix, np.arange(-1, 200, dtype=np.int32))
    with pytest.raises(ValueError, match="token id -1, and the vocabulary has 256"):
        token_id_check.check_ids([prefix], 256, tmp_path / "ids")


def test_ids_are_read_once_for_each_content(alone, tmp_path, monkeypatch):
    """What was seen of a data set is kept; any write to it, and any damage to the note, has it read again."""
    prefix, kept = str(tmp_path / "large"), tmp_path / "ids"
    write(prefix, np.arange(200_000, dtype=np.int32) % 1000)
    reads, read = [], token_id_check._extremes
    monkeypatch.setattr(token_id_check, "_extremes", lambda *args: reads.append(1) or read(*args))

    def check(vocab_size=1000):
        reads.clear()
        token_id_check.check_ids([prefix], vocab_size, kept)
        return len(reads)

    assert check() == 1 and check() == 1, (
        "the file is too new: another write might leave its times as they are"
    )
    monkeypatch.setattr(token_id_check, "_TICK_NS", -1)
    assert check() == 1 and check() == 0 and check(2000) == 0
    with pytest.raises(ValueError, match="token id 999, and the vocabulary has 999"):
        check(999)
    assert reads == []
    (record,) = kept.iterdir()
    beyond = '{"ids from and to": [0, 999], "of the first": 200001}'
    for damage in ("", "[1, 2]", '{"ids from and to": "no"}', beyond):
        record.write_text(damage)
        assert check() == 1 and check() == 0
    record.write_text('{"prefix": "large", "ids from and to": [0, 999]}')  # an earlier version's
    assert check() == 0
    before = corpus.fingerprint(prefix)
    with open(prefix + ".bin", "r+b") as stream:
        stream.seek(4 * 100_001)
        stream.write(np.int32(5000).tobytes())
    assert corpus.fingerprint(prefix) == before, "no sample of the ids shows it"
    with pytest.raises(ValueError, match="token id 5000"):
        check()
    kept = tmp_path / "file" / "ids"
    kept.parent.write_text("nothing can be written below a file")
    assert check(6000) == check(6000) == 1


def test_a_reading_that_is_cut_short_goes_on_where_it_was(alone, tmp_path, monkeypatch):
    prefix, kept = str(tmp_path / "large"), tmp_path / "ids"
    write(prefix, np.arange(5 * PART, dtype=np.int32))
    for name, value in (("_TICK_NS", -1), ("_PART", PART), ("_KEEP_S", -1.0)):
        monkeypatch.setattr(token_id_check, name, value)
    starts, read = [], token_id_check._extremes

    def extremes(prefix, info, start):
        starts.append(start)
        if len(starts) == 4:
            raise KeyboardInterrupt
        return read(prefix, info, start)

    monkeypatch.setattr(token_id_check, "_extremes", extremes)
    with pytest.raises(KeyboardInterrupt):
        token_id_check.check_ids([prefix], 5 * PART, kept)
    token_id_check.check_ids([prefix], 5 * PART, kept)
    assert starts == [0, PART, 2 * PART, 3 * PART, 3 * PART, 4 * PART]
    (record,) = kept.iterdir()
    about = json.loads(record.read_text())
    assert (about["ids from and to"], about["of the first"]) == ([0, 5 * PART - 1], 5 * PART)


def reads_a_part(prefix, vocab_size, kept, gone=()):
    """A rank case: where this rank began to read, and what it was told."""
    starts, read, part = [], token_id_check._extremes, token_id_check._PART

    def extremes(prefix, info, start):
        starts.append(start)
        if dist.get_rank() in gone:
            prefix = prefix + "-not-here"
        return read(prefix, info, start)

    token_id_check._PART, token_id_check._extremes = PART, extremes
    try:
        token_id_check.check_ids([prefix], vocab_size, Path(kept))
        return starts, ""
    except ValueError as error:
        return starts, str(error)
    finally:
        token_id_check._PART, token_id_check._extremes = part, read


def test_each_rank_reads_a_part_and_all_know_what_one_finds(ranks, tmp_path):
    prefix = str(tmp_path / "data")
    write(prefix, np.arange(3 * PART - 10, dtype=np.int32))
    pool = ranks(2)
    (first, said), (second, other) = pool.run(reads_a_part, prefix, 3 * PART, str(tmp_path / "a"))
    assert (first, second, said, other) == ([0, 2 * PART], [PART, 3 * PART], "", "")
    (first, said), (second, other) = pool.run(reads_a_part, prefix, PART, str(tmp_path / "b"))
    assert first == [0] and second == [PART], "the second round is not begun"
    assert said == other and f"token id {2 * PART - 1}, and the vocabulary has {PART}" in said
    (_, said), (_, other) = pool.run(reads_a_part, prefix, 3 * PART, str(tmp_path / "c"), (1,))
    assert said == other and "data-not-here.bin' cannot be read (No such file" in said
