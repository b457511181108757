"""A run's own file, of which the parser is shown what is not a default: the same values, the same refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.train.config import run_config
from megatron_fp8.train.config.config_file import read_config, text_without
from megatron_fp8.train.config.run_config import SECTIONS, load

CHANGES = [
    ("", ""),
    ("rotary_percent: 1.0", "rotary_percent: 0.5"),
    ("rotary_percent: 1.0", "rotary_percent: 1"),
    ("fp16: false", "fp16: no"),
    ("seed: 1234", "seed: 1e3"),
    ("seed: 1234", "seed: 2020-01-01"),
    ("rotary_base: 10000", "rotary_base: 1e4"),
    ("rope_scaling: false", "rope_scaling: 'false'"),
    ("rotary_base: 10000", "rotary_base:\n    10001"),
    ("rotary_percent: 1.0", "rotary_percent: -0.0"),
    ("run_dir: runs/", "run_dir: 1e-5/"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    load("tiny_gpt_cpu").save(path)
    return path


def read(path: Path, *options: str) -> str:
    try:
        return repr(load(path, *options))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_the_parser_need_not_see_defaults(
    written: Path, tmp_path: Path, monkeypatch: Any, before: str, after: str
) -> None:
    assert before in written.read_text()
    path = tmp_path / "config.yaml"
    path.write_text(written.read_text().replace(before, after, 1) if before else written.read_text())
    found = read(path)
    monkeypatch.setattr(run_config, "_is_default", lambda key, value: False)
    assert found == read(path)


def test_a_default_that_another_file_or_option_stands_before_is_seen(written: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("model: {rotary_percent: 0.5}\n")
    assert run_config.parse([f"--config={other}", f"--config={written}"]).model.rotary_percent == 1.0
    assert run_config.parse([f"--config={written}", f"--config={other}"]).model.rotary_percent == 0.5


def test_only_lines_of_named_keys_go(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"

    def shortened(text: str, *keys: str) -> str | None:
        path.write_text(text)
        return text_without(str(path), read_config(str(path), SECTIONS), keys)

    text = "train:\n  seed: 1  # mine\n  seq_length: 1e1\ndata:\n  paths:\n  - a\n"
    assert shortened(text, "train.seed") == "train:\n  seq_length: 1e1\ndata:\n  paths:\n  - a\n"
    assert shortened(text, "train.seed", "train.seq_length") == "data:\n  paths:\n  - a\n"
    assert shortened("train: {seed: 1, seq_length: 2}\n", "train.seed") is None
    assert shortened("resume: |\n  x\ntrain:\n  seed: 1\n", "train.seed") == "resume: |\n  x\n"
    assert shortened("train:\n    seed: 1\n", "train.seed") is None


def test_a_runs_own_file_is_shortened(written: Path, monkeypatch: Any) -> None:
    """Else nothing is gained."""
    seen = []
    monkeypatch.setattr(run_config, "_typed", lambda arguments, given: seen.extend(arguments) or {})
    load(written)
    assert len(seen) == 1 and seen[0].count("\n") < 100 < len(run_config.known_keys())
