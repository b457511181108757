"""A .bin/.idx pair or a tokenizer with other bytes: trained on or refused in one line before training starts."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.draws import draws
from tests.support.file_edits import byte_edits, edited, json_edited, json_edits
from tests.support.fuzz_targets import FIXTURES, fresh
from tests.support.run_in_process import Heard, done_or_refused

TRAIN = (
    "train --config config.yaml --run_dir=again --data.cache_dir=mine"
    " --telemetry.every=0 --checkpoint.save_interval=never"
)


def prepared(place: Path, originals: Path) -> Path:
    """The pair that the text was made into, as data of its own; its .idx."""
    fresh(place, originals, "config.yaml", "cache")
    (index,) = place.glob("cache/**/corpus.idx")
    return index


def train(data: Path) -> Heard:
    return done_or_refused(*TRAIN.split(), f"--data.paths=[{data.with_suffix('')}]")


@draws(3, often=2, suppress_health_check=[FIXTURES])
@given(st.sampled_from((".idx", ".idx", ".bin")), byte_edits())
def test_other_bytes(originals, place, ending, edits):
    index = prepared(place, originals)
    path = index.with_suffix(ending)
    path.write_bytes(edited(path.read_bytes(), edits))
    train(index)


lengths = st.lists(st.integers(0, 40), max_size=8)


@draws(4, often=2, suppress_health_check=[FIXTURES])
@given(
    lengths,
    st.lists(st.integers(0, 8), max_size=4),
    st.sampled_from((1, 2, 3, 4, 5, 8)),
    st.integers(-2, 2),
    st.data(),
)
def test_any_index_that_its_bytes_agree_with(originals, place, lengths, ends, code, more, data):
    """Whole indices of few and empty sequences and documents, as another tool may write them."""
    index = prepared(place, originals)
    dtype = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}[code]
    ends = sorted([0, *ends, len(lengths)]) if data.draw(st.booleans()) else ends
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if lengths else []
    index.write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(ends))
        + np.array(lengths, np.int32).tobytes()
        + (np.array(starts, np.int64) * np.dtype(dtype).itemsize).tobytes()
        + np.array(ends, np.int64).tobytes()
    )  # fmt: skip
    ids = np.arange(max(0, sum(lengths) + more)) % data.draw(st.sampled_from((1, 100, 300)))
    index.with_suffix(".bin").write_bytes(ids.astype(dtype).tobytes())
    train(index)


@draws(5, suppress_health_check=[FIXTURES])
@given(st.sampled_from(("tokenizer.json", "tokenizer_config.json", "generation_config.json")), json_edits())
def test_other_values_in_a_tokenizer(originals, place, name, edits):
    fresh(place, originals, "config.yaml", "corpus.txt", "hf")
    path = place / "hf" / name
    path.write_text(json.dumps(json_edited(json.loads(path.read_text()), edits)))
    done_or_refused(*TRAIN.split(), "--data.tokenizer=hf/tokenizer.json")


@draws(3, suppress_health_check=[FIXTURES])
@given(st.sampled_from(("tokenizer.json", "tokenizer_config.json", "generation_config.json")), byte_edits())
def test_other_bytes_in_a_tokenizer(originals, place, name, edits):
    fresh(place, originals, "config.yaml", "corpus.txt", "hf")
    path = place / "hf" / name
    path.write_bytes(edited(path.read_bytes(), edits))
    done_or_refused(*TRAIN.split(), "--data.tokenizer=hf/tokenizer.json")


def test_a_whole_corpus_is_trained_on(originals, place):
    """Else these tests would show nothing."""
    assert train(prepared(place, originals)).code == 0
    fresh(place, originals, "config.yaml", "corpus.txt", "hf")
    assert done_or_refused(*TRAIN.split(), "--data.tokenizer=hf/tokenizer.json").code == 0
