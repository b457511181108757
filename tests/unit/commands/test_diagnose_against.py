"""`megatron-fp8 diagnose A --against B`: what it takes, where it looks, and what helps when it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import yaml

from megatron_fp8.commands.main import main
from tests.support.checkpoint_files import write_checkpoint
from tests.support.run_folders import write_run

CONFIG = {"train": {"seed": 1}, "data": {"paths": ["text"]}}


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of the same losses, without telemetry."""
    folders = [write_run(tmp_path / name, every=0) for name in ("one", "two")]
    for folder in folders:
        configure(folder)
    return folders[0], folders[1]


def configure(folder: Path, **sections: object) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **sections}))


def said(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """What a comparison prints, on stderr if it is refused."""
    assert main(["diagnose", *map(str, arguments)]) == code
    found = capsys.readouterr()
    return found.err if code else found.out


def test_checkpoints_are_where_the_config_says(runs, tmp_path, capsys):
    one, two = runs
    for value, folder in enumerate(runs):
        configure(folder, checkpoint={"folder": str(tmp_path / "disk" / folder.name)})
        for iteration in (2, 4):
            w = torch.full((3,), 1.0 + value * (iteration > 2))
            write_checkpoint(tmp_path / "disk" / folder.name, iteration, {"w": w})
    text = said(capsys, 0, one, "--against", two)
    assert "iter_0000004 is the first whose weights differ: 1 tensors, most w, by 100 % of its norm" in text
    configure(two, checkpoint={"folder": None})  # the one in its own folder, where none is
    text = said(capsys, 0, one, "--against", two)
    assert f"none of the same iteration is in {tmp_path / 'disk' / 'one'} and {two / 'checkpoints'}" in text


def test_a_relative_folder_of_checkpoints_is_not_looked_for_from_here(runs, tmp_path, capsys, monkeypatch):
    one, two = runs
    configure(two, checkpoint={"folder": "saves"})
    for folder in (one / "checkpoints", tmp_path / "saves"):
        write_checkpoint(folder, 2, {"w": torch.ones(3)})
    monkeypatch.chdir(tmp_path)
    text = said(capsys, 0, one, "--against", two, f"--json={tmp_path / 'figures.json'}")
    assert f"checkpoint  not compared: '{two / 'config.yaml'}' has checkpoint.folder='saves'" in text
    assert json.loads((tmp_path / "figures.json").read_text())["checkpoint"] is None


@pytest.mark.parametrize(
    "option", ["--batches=99", "--share=7", "--budget=9", "--iteration=3", "--recipe=mxfp8", "--out=x"]
)
def test_options_of_a_diagnosis_are_refused(runs, capsys, option):
    one, two = runs
    name = option.partition("=")[0]
    assert f"leave out {name}\n" in said(capsys, 2, one, "--against", two, option)


def test_what_cannot_be_compared_is_said_with_what_helps(runs, tmp_path, capsys):
    one, two = runs
    for folder, shape in ((one, 3), (two, 4)):
        write_checkpoint(folder / "checkpoints", 2, {"w": torch.ones(shape)})
    assert "it has no w of shape [3]. Give two runs of one model" in said(capsys, 2, one, "--against", two)
    configure(two, checkpoint={"folder": 3})
    assert "bring it back as train wrote it" in said(capsys, 2, one, "--against", two)
    configure(two)
    lines = (two / "metrics.jsonl").read_text().splitlines(keepends=True)
    (one / "metrics.jsonl").write_text("".join(lines[:20]))
    (two / "metrics.jsonl").write_text("".join(lines[20:]))
    assert "give two runs that trained the same iterations" in said(capsys, 2, one, "--against", two)
    configure(two, train={"seed": 2})
    assert "Give two runs in which that is the same" in said(capsys, 2, one, "--against", two)
    for content in ("train: [", "- a", "checkpoint: 3"):
        (two / "config.yaml").write_text(content)
        text = said(capsys, 2, one, "--against", two)
        assert f"'{two / 'config.yaml'}'" in text and ("another run" in text or "folder of a run" in text)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_part_too_and_json_says_so_in_a_word(runs, tmp_path, capsys, value):
    one, two = runs
    write_checkpoint(one / "checkpoints", 2, {"w": torch.ones(3)})
    write_checkpoint(two / "checkpoints", 2, {"w": torch.tensor([1.0, value, 1.0])})
    figures = tmp_path / "figures.json"
    said(capsys, 0, one, "--against", two, f"--json={figures}")
    found = json.loads(figures.read_text(), parse_constant=pytest.fail)
    assert found["checkpoint"]["relative"] == ("NaN" if math.isnan(value) else "Infinity")
