"""A Hugging Face directory that somebody else made: imported or refused in one line, and nothing read outside of it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.draws import draws
from tests.support.file_edits import byte_edits, edited, json_edited, json_edits
from tests.support.fuzz_targets import FIXTURES, fresh
from tests.support.run_in_process import Heard, done_or_refused

SINGLE = "model.safetensors"
JSONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
)
SOURCES = ("hf", "hf_shards", "hf_fp8")


def take(source: Path) -> Heard:
    """Import it; what was taken goes on as a run does."""
    imported = done_or_refused("import", source, "imported")
    if imported.code:
        return imported
    return done_or_refused("generate", "imported", "--prompt", "the", "--max-new-tokens", "1")


@draws(4, often=2, suppress_health_check=[FIXTURES])
@given(st.sampled_from(SOURCES), st.sampled_from(JSONS), json_edits())
def test_other_values(originals, place, source, name, edits):
    path = fresh(place, originals, source) / source / name
    if path.exists():
        path.write_text(json.dumps(json_edited(json.loads(path.read_text()), edits)))
        take(path.parent)


@draws(4, often=2, suppress_health_check=[FIXTURES])
@given(st.sampled_from(SOURCES), st.integers(0, 5), byte_edits())
def test_other_bytes(originals, place, source, number, edits):
    files = sorted((fresh(place, originals, source) / source).iterdir())
    path = files[number % len(files)]
    path.write_bytes(edited(path.read_bytes(), edits))
    take(path.parent)


@draws(4, often=2, suppress_health_check=[FIXTURES])
@given(st.sampled_from(("hf", "hf_fp8")), json_edits())
def test_another_header_of_safetensors(originals, place, source, edits):
    """Shapes, dtypes and places of tensors: eight bytes of length, and JSON."""
    path = fresh(place, originals, source) / source / SINGLE
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.dumps(json_edited(json.loads(data[8 : 8 + size]), edits)).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])
    take(path.parent)


@pytest.mark.parametrize("source", SOURCES)
def test_a_whole_directory_is_taken(originals, place, source):
    """Else these tests would show nothing."""
    fresh(place, originals, source)
    assert take(place / source).code == 0
