"""A tokenizer that is trained on text: says every text, the same from the same files, from all of a corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fp8.train.data import bpe
from megatron_fp8.train.data.documents import DocumentRules
from megatron_fp8.train.data.tokenizers import JsonTokenizer

WORDS = "the tall tower, the taller tower, 2026 towers; don't tell\n\tthem\r\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(WORDS * 20)
    return path


def test_it_says_every_text_and_merges_what_is_frequent(text: Path, tmp_path: Path) -> None:
    trained = bpe.train_bpe([text], 300)
    (tmp_path / "tokenizer.json").write_text(trained.to_str())
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.eod == 0 and tokenizer.unknown is None and bpe.SMALLEST <= tokenizer.vocab_size <= 300
    for said in (WORDS, "Пример 例 \U0001f600\u0301", "  \n\n \x01\x7f", ""):
        ids = tokenizer.encode(said.encode())
        assert tokenizer.decode(ids.tolist()) == said
    assert len(tokenizer.encode(WORDS.encode())) < len(WORDS) / 2
    assert len(tokenizer.encode(b"20262026")) >= 3, "at most three digits are one id"


def test_the_same_files_give_the_same_tokenizer(text: Path) -> None:
    first, second = (bpe.train_bpe([text], 400).to_str() for _ in range(2))
    assert first == second
    text.write_text(text.read_text() + "zzz zzz zzz")
    assert bpe.train_bpe([text], 400).to_str() != first


def test_of_a_large_corpus_it_reads_documents_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"story": "row {n}", "text": ""}}\n' for n in range(100)))
    found = [*bpe.sample([path], DocumentRules("story"), most=path.stat().st_size // 10)]
    assert found == [f"row {n}" for n in range(0, 100, 100 // len(found))] and 8 <= len(found) <= 10
    assert len([*bpe.sample([path], DocumentRules("story"))]) == 100


def test_what_is_no_text_and_a_vocabulary_without_all_bytes_are_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="256 has no id for each byte: give at least 257"):
        bpe.train_bpe([text], 256)
    with pytest.raises(ValueError, match="larger than any in use"):
        bpe.train_bpe([text], 10**30)
    assert bpe.train_bpe([text], 257).get_vocab_size() == 257
    text.write_bytes(b"MZ\0\0")
    with pytest.raises(ValueError, match="byte 2 is NUL"):
        bpe.train_bpe([text], 300)
    with pytest.raises(ValueError, match="there is no such file"):
        bpe.train_bpe([tmp_path / "none"], 300)
