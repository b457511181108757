"""Text files: what is cut, and what of them is lost and said."""

from __future__ import annotations

import hashlib
import io
import warnings
from pathlib import Path

import pytest

from megatron_fp8.train.data import corpus, documents
from megatron_fp8.train.data.tokenizers import ByteTokenizer, JsonTokenizer


def words(path: Path, kind: str) -> JsonTokenizer:
    """A tokenizer that knows three words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = ["<unk>", "one", "two", "three"]
    if kind == "Unigram":
        model = models.Unigram([(word, -1.0) for word in vocab], unk_id=0)
    else:
        numbered = {word: number for number, word in enumerate(vocab)}
        model = models.WordLevel(numbered, unk_token="<unk>")
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(path))
    return JsonTokenizer(path)


@pytest.mark.parametrize("letter", ["é", "語", "😀"])
def test_a_long_line_is_cut_between_two_characters(letter):
    for before in range(4):
        text = b"x" * before + letter.encode() * (documents.PIECE_BYTES // 2)
        found = list(documents.pieces(io.BytesIO(text)))
        assert b"".join(found) == text
        assert all("\ufffd" not in piece.decode("utf-8", errors="replace") for piece in found)
        assert all(documents.PIECE_BYTES - 4 < len(piece) <= documents.PIECE_BYTES for piece in found[:-1])


def test_bytes_that_are_no_text_are_cut_too():
    text = bytes([0x80]) * (documents.PIECE_BYTES + 9)
    assert [len(piece) for piece in documents.pieces(io.BytesIO(text))] == [documents.PIECE_BYTES, 9]


@pytest.mark.parametrize("kind", ["WordLevel", "Unigram"])
def test_what_a_tokenizer_does_not_know_is_counted_and_said_from_the_cache_too(tmp_path, kind):
    tokenizer = words(tmp_path / "tokenizer.json", kind)
    text = tmp_path / "text.txt"
    text.write_text("one two zzz three\n")
    assert tokenizer.unknown == 0
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"no token for 1 of 4 pieces of the text"):
            corpus.prepare([text], tokenizer, tmp_path / "cache")
    text.write_text("one two three\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        corpus.prepare([text], tokenizer, tmp_path / "cache")


@pytest.mark.parametrize(
    ("bytes_", "fallback", "counted"), [(0, False, 4), (128, True, 4), (256, True, 0), (0, None, 0)]
)
def test_what_bpe_passes_over_is_counted_and_said(tmp_path, bytes_, fallback, counted):
    """Without a token for the unknown it leaves out what it lacks; None: the alphabet of all bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    if fallback is None:
        letters = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
        made = Tokenizer(models.BPE(letters, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        vocab = {"a": 0, "b": 1, "ab": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(bytes_)}
        made = Tokenizer(models.BPE(vocab, [("a", "b")], byte_fallback=fallback))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = JsonTokenizer(tmp_path / "tokenizer.json"), tmp_path / "text.txt"
    text.write_text("ab \u0178\u0178 ab\na\U0001f600b\u0178\n")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):  # from the cache too
            corpus.prepare([text], tokenizer, tmp_path / "cache")
    words = f"data: the tokenizer has no token for {counted} characters of the text, nor an unknown token"
    assert [str(one.message).startswith(words) for one in said] == [True] * (2 if counted else 0)


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel"])
def test_what_no_token_says_is_refused_where_a_tokenizer_raises(tmp_path, kind):
    from tokenizers import Tokenizer, models

    vocab = {"one": 0}
    model = models.Unigram([("one", -1.0)]) if kind == "Unigram" else models.WordLevel(vocab)
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = JsonTokenizer(tmp_path / "tokenizer.json"), tmp_path / "text.txt"
    text.write_text("zzz")
    with pytest.raises(
        ValueError,
        match=r"data\.tokenizer='.*tokenizer\.json' cannot say all of the text \(.*for the unknown",
    ):
        corpus.prepare([text], tokenizer, tmp_path / "cache")


@pytest.mark.parametrize(
    ("place", "bad", "why"),
    [
        (0, b"\0", "NUL"),
        (documents._READ_BYTES - 1, b"\xed\xa0\x80", "not UTF-8"),
        (documents._READ_BYTES + 5, b"\0", "NUL"),
    ],
)
def test_what_is_no_text_is_refused_by_name_and_place(tmp_path, place, bad, why):
    path = tmp_path / "text.txt"
    path.write_bytes(b"x" * place + bad + b"y" * 9)
    match = rf"text\.txt', which is no text \(byte {place} is {why}\): leave it out; .* UTF-8 \(iconv"
    with pytest.raises(ValueError, match=match):
        corpus.prepare([path], ByteTokenizer(), tmp_path / "cache")
    path.write_bytes(b"abc" + "語".encode()[:2])  # the file's end cuts a character
    with pytest.raises(ValueError, match=r"byte 3 is not UTF-8"):
        documents.content_digest(path)
    path.write_bytes(b"x" * place + "é\n".encode())
    corpus.prepare([path], ByteTokenizer(), tmp_path / "cache")


def test_a_digest_is_of_all_bytes(tmp_path):
    (tmp_path / "long.txt").write_bytes("aé".encode() * documents._READ_BYTES)
    expected = hashlib.sha256((tmp_path / "long.txt").read_bytes()).digest()
    assert documents.content_digest(tmp_path / "long.txt") == expected
    (tmp_path / "table.parquet").write_bytes(b"PAR1\0")
    assert (
        documents.content_digest(tmp_path / "table.parquet", is_text=False)
        == hashlib.sha256(b"PAR1\0").digest()
    )


def test_a_record_that_is_something_else_says_nothing():
    for record in (None, 3, {}, {"tokens": "x"}, {"tokens": 1, "unknown": True}):
        assert documents.unknown_tokens_of(record) == documents.UnknownTokens()
    assert documents.unknown_tokens_of(
        {"tokens": 9, "unknown": 2, "undecodable": 1}
    ) == documents.UnknownTokens(9, 2)
