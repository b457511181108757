"""`megatron-fp8 tokenizer`: texts, records and chats; what it refuses, before anything is written."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_fp8 import mcore
from megatron_fp8.commands.main import main
from megatron_fp8.train.data.tokenizers import JsonTokenizer


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    yield
    mcore.uninstall()


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["tokenizer", *map(str, arguments)])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_chats_are_read_without_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A template comes with a tokenizer, and there is none yet: what was said counts."""
    chat = {"messages": [{"role": "user", "content": "tower"}, {"role": "assistant", "content": "a tower"}]}
    (tmp_path / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 9)
    code, out, err = run(
        capsys, "--data", tmp_path / "chats.jsonl", "--vocab-size=270", "--out", tmp_path / "t.json"
    )
    assert code == 0 and not err and f"wrote       {tmp_path / 't.json'}: " in out and "use it" in out
    assert len(JsonTokenizer(tmp_path / "t.json").encode(b"tower")) == 1


def test_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, there = tmp_path / "empty.txt", tmp_path / "there.json"
    empty.write_text("")
    there.write_text("mine")
    for arguments, said in (
        (["--data", empty, "--out", tmp_path / "t.json"], "--data has no text"),
        (["--out", there], "is there already: give another file, or remove it"),
        (["--out", tmp_path / "none" / "t.json"], "there is no such folder"),
        (["--data", tmp_path / "none.txt", "--out", tmp_path / "t.json"], "there is no such file"),
        (["--vocab-size=256", "--out", tmp_path / "t.json"], "give at least 257"),
    ):
        code, out, err = run(capsys, *arguments)
        assert code == 2 and not out and err.startswith("error: ") and said in err, err
    assert there.read_text() == "mine" and not (tmp_path / "t.json").exists()
