"""JSONL, CSV, Parquet, Arrow, JSON and folders: the same documents from each, and what is refused."""

from __future__ import annotations

import csv
import json
import sys
import tracemalloc
from pathlib import Path

import pytest

from megatron_fp8.train.data import corpus, documents
from megatron_fp8.train.data.documents import DocumentRules, files_of, read_documents
from megatron_fp8.train.data.tokenizers import ByteTokenizer

ROWS = [{"id": n, "text": f'row {n}, "é"\nNA', "body": f"body {n}"} for n in range(40)]


def jsonl(path: Path) -> None:
    path.write_text("\ufeff" + "".join(json.dumps(row) + "\n\n" for row in ROWS), encoding="utf-8")


def table(path: Path, delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.DictWriter(stream, list(ROWS[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


def parquet(path: Path) -> None:
    pytest.importorskip("datasets").Dataset.from_list(ROWS).to_parquet(path)


def arrow(path: Path) -> None:
    from pyarrow import Table, ipc

    pytest.importorskip("datasets")
    whole = Table.from_pylist(ROWS)
    with ipc.new_stream(str(path), whole.schema) as writer:
        writer.write_table(whole)


def array(path: Path) -> None:
    pytest.importorskip("datasets")
    path.write_text(json.dumps(ROWS), encoding="utf-8")


KINDS = {
    "a.jsonl": jsonl,
    "a.ndjson": jsonl,
    "a.csv": table,
    "a.tsv": lambda path: table(path, "\t"),
    "a.JSON": array,
    "[a]*.parquet": parquet,  # no pattern
    "a.arrow": arrow,
}


def read(path: Path, **rules) -> list[bytes]:
    return [document.text for document in read_documents(path, ByteTokenizer(), DocumentRules(**rules))]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_same_documents(tmp_path, name):
    KINDS[name](tmp_path / name)
    assert read(tmp_path / name) == [row["text"].encode() for row in ROWS]
    assert read(tmp_path / name, column="body") == [row["body"].encode() for row in ROWS]
    prefix = corpus.prepare([tmp_path / name], ByteTokenizer(), tmp_path / "cache")
    assert corpus.check_indexed(prefix).sequences == len(ROWS)
    with pytest.raises(
        ValueError, match=r"record 1: it has no title \(it has id, text, body\): name the column"
    ):
        read(tmp_path / name, column="title")
    if name not in ("a.csv", "a.tsv"):  # which have texts alone
        with pytest.raises(ValueError, match="record 1: id is int"):
            read(tmp_path / name, column="id")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r"line 2 is no JSON"),
        ("[1]", r"record 2: it is no object, but list"),
        (
            '{"prompt": "x"}',
            r"record 2: it has no messages and no text \(it has prompt\): .* --data\.column=NAME",
        ),
        ('{"text": ["x"]}', r"record 2: text is list, and neither a text nor a list of messages"),
        ('{"text": "\\ud800"}', r"record 2: it holds half of a character"),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            r"is a chat, and the tokenizer has no chat template",
        ),
    ],
)
def test_records_that_are_none_are_named(tmp_path, line, words):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + line)
    with pytest.raises(ValueError, match=rf"a\.jsonl', .*{words}"):
        read(tmp_path / "a.jsonl")


def test_records_without_text_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": null}\n{"text": "x", "messages": null}\n')
    assert read(tmp_path / "a.jsonl") == [b"x"]


def test_a_loss_on_answers_needs_chats(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}')
    (tmp_path / "a.txt").write_text("x")
    for name in ("a.jsonl", "a.txt"):
        with pytest.raises(ValueError, match=r"data\.loss=assistant and .*give records with messages"):
            read(tmp_path / name, loss="assistant")


@pytest.mark.parametrize("name", ["a.parquet"])
def test_what_is_no_table_is_named(tmp_path, name):
    pytest.importorskip("datasets")
    (tmp_path / name).write_bytes(b"PAR1 and more")
    with pytest.raises(ValueError, match=rf"{name}', which cannot be read as {name[2:]}"):
        read(tmp_path / name)


def test_without_datasets_jsonl_and_csv_are_read_and_the_rest_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    jsonl(tmp_path / "a.jsonl")
    table(tmp_path / "a.csv")
    assert read(tmp_path / "a.jsonl") == read(tmp_path / "a.csv")
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"a\.parquet', which the package datasets reads: run pip install datasets"
    ):
        read(tmp_path / "a.parquet")


def test_binary_data_under_the_name_of_records_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\x7fELF\0")
    with pytest.raises(ValueError, match="byte 4 is NUL"):
        corpus.prepare([tmp_path / "a.jsonl"], ByteTokenizer(), tmp_path / "cache")


def test_a_folder_gives_its_records_or_else_all_its_files(tmp_path):
    for name in ("b/2.txt", "b/1.py", "a.txt", ".git/x", "b/__pycache__/x.pyc", "pair.bin", "pair.idx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = [path.relative_to(tmp_path).as_posix() for path in files_of(tmp_path)]
    assert found == ["a.txt", "b/1.py", "b/2.txt", "pair.idx"]
    (tmp_path / "b" / "rows.jsonl").write_text("")
    assert files_of(tmp_path) == [tmp_path / "b" / "rows.jsonl"]
    (tmp_path / "b" / "test-00000.jsonl").write_text("")
    with pytest.warns(UserWarning, match=r"all its 2 files are learned, .*test-00000\.jsonl' too"):
        files_of(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="a folder without files"):
        files_of(tmp_path / "none")


def test_memory_does_not_grow_with_the_file(tmp_path):
    """A long text, and many records: a sixth of the file is held at most."""
    (tmp_path / "long.txt").write_bytes(b"a line of text\n" * (1 << 20))
    (tmp_path / "long.jsonl").write_bytes((json.dumps({"text": "x" * 4096}).encode() + b"\n") * 4000)
    for name in ("long.txt", "long.jsonl"):
        tracemalloc.start()
        corpus._content_hash([tmp_path / name], ByteTokenizer(), DocumentRules())
        total = sum(
            len(document.text)
            for document in read_documents(tmp_path / name, ByteTokenizer(), DocumentRules())
        )
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert total >= 15 << 20 and 6 * most < total, (name, most)


def test_every_kind_that_a_name_says_has_a_reader():
    assert {Path(name).suffix.lower() for name in KINDS} == set(documents._READERS)
