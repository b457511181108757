"""Data preparation: what is written, once and whole, and every way in which what is there can be wrong."""

import errno
import json
import os
import struct
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_fp8.train.data import corpus
from megatron_fp8.train.data.documents import PIECE_BYTES
from megatron_fp8.train.data.tokenizers import ByteTokenizer, JsonTokenizer, load_tokenizer


@pytest.fixture
def texts(tmp_path):
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_bytes(b"hello\nworld\n")
    b.write_bytes(bytes(range(1, 128)) + "é".encode() * 64 + b"\n")
    return [a, b]


@pytest.fixture
def prefix(texts, tmp_path):
    return corpus.prepare(texts, ByteTokenizer(), tmp_path / "cache")


def test_documents_are_the_files_bytes_each_ended_by_eod(prefix):
    found = IndexedDataset(prefix)
    assert [list(document) for document in found] == [
        [*b"hello\nworld\n", 256],
        [*range(1, 128), *"é".encode() * 64, 10, 256],
    ]
    assert list(found.document_indices) == [0, 1, 2]
    assert corpus.check_indexed(prefix) == corpus.IndexedInfo(np.dtype(np.uint16), 270, 2)
    assert list(corpus.sequence_lengths(prefix)) == [13, 257]


def test_long_files_are_cut_at_line_ends_and_nothing_is_lost(tmp_path):
    lines = [f"{number} {'x' * (number % 97)}\n" for number in range(5000)]
    text = "".join(lines).encode()
    (tmp_path / "long.txt").write_bytes(text)
    found = IndexedDataset(corpus.prepare([tmp_path / "long.txt"], ByteTokenizer(), tmp_path / "cache"))
    pieces = [bytes(document[:-1].astype(np.uint8)) for document in found]
    assert len(pieces) > 3 and b"".join(pieces) == text
    assert all(piece.endswith(b"\n") and len(piece) <= PIECE_BYTES for piece in pieces)


def test_the_cache_goes_by_content(texts, prefix, tmp_path, monkeypatch):
    assert corpus.prepare([*texts], ByteTokenizer(), tmp_path / "cache") == prefix
    with monkeypatch.context() as patched:  # a second run does not write again
        patched.setattr(corpus, "_write", lambda *_: pytest.fail("written twice"))
        corpus.prepare(texts, ByteTokenizer(), tmp_path / "cache")
    texts[0].write_bytes(b"hello\nworld!")  # the same size
    assert corpus.prepare(texts, ByteTokenizer(), tmp_path / "cache") != prefix


def _zero(folder):
    (folder / "corpus.bin").write_bytes(bytes((folder / "corpus.bin").stat().st_size))


def _without_digests(folder):
    about = json.loads((folder / "corpus.json").read_text())
    del about["sha256"]
    (folder / "corpus.json").write_text(json.dumps(about))


def _not_a_record(folder):
    (folder / "corpus.json").write_text("[1]")


@pytest.mark.parametrize(
    "hurt, said",
    [
        (_zero, r"corpus\.bin is not what was written"),
        (lambda folder: (folder / "corpus.bin").unlink(), "No such file"),
        (_without_digests, r"corpus\.json has no digests"),
        (_not_a_record, r"corpus\.json has no digests"),
    ],
    ids=["zeros", "no tokens", "no digests", "not a record"],
)
def test_a_prepared_text_that_is_not_what_was_written_is_written_again(texts, prefix, hurt, said, tmp_path):
    folder = Path(prefix).parent
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    hurt(folder)
    with pytest.warns(UserWarning, match=f"written again: .*{said}"):
        assert corpus.prepare(texts, ByteTokenizer(), tmp_path / "cache") == prefix
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        corpus.prepare(texts, ByteTokenizer(), tmp_path / "cache")


def test_an_interrupted_preparation_leaves_nothing_behind(texts, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus.IndexedDatasetBuilder, "finalize", full)
    with pytest.raises(ValueError, match="No space left on device"):
        corpus.prepare(texts, ByteTokenizer(), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()  # nor was it there before


def test_files_that_are_not_there_or_empty(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.txt.*no such file"):
        corpus.prepare([tmp_path / "nothing.txt"], ByteTokenizer(), tmp_path / "cache")
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ValueError, match="all empty"):
        corpus.prepare([tmp_path / "empty.txt"], ByteTokenizer(), tmp_path / "cache")
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "one.txt").write_bytes(b"1")
    with pytest.raises(ValueError, match=r"data\.cache_dir"):
        corpus.prepare([tmp_path / "one.txt"], ByteTokenizer(), tmp_path / "file")


def test_the_default_corpus_is_the_standard_library_in_a_fixed_order():
    files = corpus.standard_library_files()
    assert files == corpus.standard_library_files() and len(files) > 300
    assert any(path.name == "dataclasses.py" for path in files)
    assert not any("test" in path.parts or "site-packages" in path.parts for path in files)
    assert files != sorted(files)  # shuffled by name, so that a split is like the whole


# ------------------------------------------------------------------------------------- what is corrupt


def _patch(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("bin short", "its index says 270 tokens of 2 bytes, 540 bytes in all, and it has 530"),
        ("bin gone", "is not there"),
        ("idx foreign", "does not start like a Megatron index"),
        ("idx version", "version 7"),
        ("idx dtype", "dtype code 99"),
        ("idx float", "its ids are float32, and ids are whole numbers"),
        ("idx count", "which take"),
        ("idx lengths", "disagree"),
        ("idx pointers", "disagree"),
        ("idx no ends", "document ends must rise from 0 to the 2 sequences, and there are none"),
    ],
)
def test_a_pair_that_is_not_what_its_index_says(prefix, tmp_path, what, reason):
    folder = (tmp_path / "cache").glob("*")
    data, index = sorted(next(folder).glob("corpus.[bi]*"))
    changes = {
        "bin short": lambda: data.write_bytes(data.read_bytes()[:-10]),
        "bin gone": data.unlink,
        "idx foreign": lambda: index.write_bytes(b"\x00" * 200),
        "idx version": lambda: _patch(index, 9, struct.pack("<Q", 7)),
        "idx dtype": lambda: _patch(index, 17, b"\x63"),
        "idx float": lambda: _patch(index, 17, b"\x07"),
        "idx count": lambda: _patch(index, 18, struct.pack("<Q", 1 << 60)),
        "idx lengths": lambda: _patch(index, 34, struct.pack("<ii", 14, 256)),
        "idx no ends": lambda: index.write_bytes(
            index.read_bytes()[:26] + bytes(8) + index.read_bytes()[34 : 34 + 2 * 12]
        ),
        "idx pointers": lambda: _patch(index, 34 + 8, struct.pack("<q", 2)),
    }
    changes[what]()
    with pytest.raises(ValueError, match=reason) as error:
        corpus.check_indexed(prefix)
    assert str(data if what.startswith("bin") else index) in str(error.value)


def test_a_prefix_may_be_given_with_either_ending(prefix):
    for path in (prefix, prefix + ".bin", prefix + ".idx"):
        assert corpus.is_prefix(path) and corpus.prefix_of(path) == prefix
    assert not corpus.is_prefix(prefix + "x")


# -------------------------------------------------------------------------------------------- tokenizers


@pytest.fixture
def tokenizer_file(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({"hello": 0, "world": 1, "[UNK]": 2, "</s>": 3}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_tokenizers_file(tokenizer_file, texts, tmp_path):
    tokenizer = load_tokenizer(str(tokenizer_file))
    assert (tokenizer.vocab_size, tokenizer.eod) == (4, 3)
    found = IndexedDataset(corpus.prepare(texts[:1], tokenizer, tmp_path / "cache"))
    assert [list(document) for document in found] == [[0, 1, 3]]


def test_a_tokenizers_file_without_an_end_gets_one(tokenizer_file):
    content = json.loads(tokenizer_file.read_text())
    del content["model"]["vocab"]["</s>"]
    tokenizer_file.write_text(json.dumps(content))
    tokenizer = JsonTokenizer(tokenizer_file)
    assert (tokenizer.vocab_size, tokenizer.eod) == (4, 3)


def test_what_is_no_tokenizers_file(tmp_path):
    with pytest.raises(ValueError, match="is not a file"):
        load_tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json.*is not a Hugging Face tokenizers file"):
        load_tokenizer(str(tmp_path / "bad.json"))


def test_files_that_cannot_be_read_are_named_with_their_option(tmp_path, tokenizer_file, prefix, monkeypatch):
    large = tmp_path / "large.json"
    large.touch()
    os.truncate(large, 300 * 2**20)
    with pytest.raises(ValueError, match=r"data\.tokenizer='.*large\.json' .*too many.*: give another file"):
        load_tokenizer(str(large))
    with pytest.raises(ValueError, match=r"data\.tokenizer='x+' is not a file"):
        load_tokenizer("x" * 300)
    beside = tokenizer_file.with_name("tokenizer_config.json")
    beside.touch()
    os.truncate(beside, 300 * 2**20)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json', beside data\.tokenizer=.*or remove it"):
        load_tokenizer(str(tokenizer_file))
    usual = Path.open
    for ending in (".idx", ".bin"):

        def refuse(path, *args, ending=ending, **more):
            if path.suffix == ending:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return usual(path, *args, **more)

        monkeypatch.setattr(Path, "open", refuse)
        named = rf"data\.paths names '{prefix}'.*Permission denied: '{prefix}\{ending}'\): make both"
        with pytest.raises(ValueError, match=named):
            corpus.check_indexed(prefix)


def test_a_preparation_that_was_killed_is_taken_over_and_its_rest_removed(texts, prefix, tmp_path, capsys):
    folder = Path(prefix).parent
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    for path in folder.iterdir():
        path.unlink()
    (folder / ".unfinished-1").mkdir()
    (folder / ".unfinished-1" / "corpus.bin").write_bytes(b"half")
    code = (
        "import os, sys; from pathlib import Path; from megatron_fp8.files.run_lock import RunLock;"
        "held = RunLock(Path(sys.argv[1]), '', environ={}); held.take(print); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=False)
    assert corpus.prepare(texts, ByteTokenizer(), tmp_path / "cache") == prefix
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert "its process has ended" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:the prepared text in")
@pytest.mark.parametrize("overtaken", [False, True])
def test_of_two_starts_one_prepares_a_text(tmp_path, monkeypatch, capsys, overtaken):
    """The other waits. If it takes over meanwhile, the first writes nothing more."""
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_bytes(b"hello\nworld\n")
    usual, threads, done, written, written_by_other = corpus._write, [], [], [], []

    def again():
        done.append(corpus.prepare([text], ByteTokenizer(), cache))

    def slow(files, tokenizer, prefix, *more):
        written.append(prefix)
        if len(written) == 1 and overtaken:
            (Path(prefix).parents[1] / ".lock").unlink()
            again()
            written_by_other.append(Path(done[0] + ".bin").stat().st_ino)
            Path(prefix).parent.mkdir()
        elif len(written) == 1:
            threads.append(threading.Thread(target=again))
            threads[0].start()
            deadline = time.monotonic() + 100
            said = ""
            while "waiting for process" not in said and time.monotonic() < deadline:
                said += capsys.readouterr().err
                time.sleep(0.01)
            assert said.count(f"lock        waiting for process {os.getpid()} on ") == 1
        return usual(files, tokenizer, prefix, *more)

    monkeypatch.setattr(corpus, "_write", slow)
    monkeypatch.setattr(corpus, "_LOOK_S", 0.02)
    again()
    for thread in threads:
        thread.join(100)
    assert len(done) == 2 and done[0] == done[1] and len(written) == 1 + overtaken
    if overtaken:
        assert written_by_other == [Path(done[0] + ".bin").stat().st_ino]
    assert sorted(path.name for path in Path(done[0]).parent.iterdir()) == [
        "corpus.bin",
        "corpus.idx",
        "corpus.json",
    ]
