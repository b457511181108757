"""A checkpoint with other bytes: every command refuses it in one line, or has what was saved; and no code of it runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8.files.checkpoint import file_record
from megatron_fp8.files.manifest import checksum
from tests.support.draws import draws
from tests.support.file_edits import byte_edits, edited, json_edited, json_edits
from tests.support.fuzz_targets import EXPORT, FILES, FIXTURES, NEWEST, TRAIN, fresh
from tests.support.run_in_process import done_or_refused

COMMANDS = (
    EXPORT,
    TRAIN,
    "inspect run",
    "inspect run --check --json",
    "generate run --prompt the --max-new-tokens 2 --temperature 0",
    "calibrate run --batches 1 --batch-size 1 --out calibration",
)


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def write_manifest(folder: Path, content: dict) -> None:
    """With the checksum that it should have, as anybody can compute it."""
    (folder / "manifest.json").write_text(json.dumps({**content, "sha256": checksum(content)}))


def forge(folder: Path) -> None:
    """Make the manifest agree with the files, whatever is in them."""
    content = json.loads((folder / "manifest.json").read_text())
    content["files"] = {name: file_record(folder / name) for name in content["files"]}
    write_manifest(folder, content)


@draws(4, often=2, suppress_health_check=[FIXTURES])
@given(st.sampled_from(FILES), byte_edits(), st.sampled_from(COMMANDS))
def test_damage_is_refused_or_changes_nothing(originals, place, name, edits, command):
    fresh(place, originals, "run", "config.yaml", "corpus.txt", "cache")
    path = place / "run" / "checkpoints" / NEWEST / name
    path.write_bytes(edited(path.read_bytes(), edits))
    if done_or_refused(*command.split()).code == 0 and command == EXPORT:
        done_or_refused("export", originals / "run", "expected")
        assert weights(place / "out") == weights(place / "expected")


@draws(4, often=2, suppress_health_check=[FIXTURES])
@given(st.sampled_from(FILES[:2]), byte_edits(), st.sampled_from(COMMANDS))
def test_other_bytes_under_a_manifest_that_agrees(originals, place, name, edits, command):
    fresh(place, originals, "run", "config.yaml", "corpus.txt", "cache")
    path = place / "run" / "checkpoints" / NEWEST / name
    path.write_bytes(edited(path.read_bytes(), edits))
    forge(path.parent)
    done_or_refused(*command.split())


@pytest.mark.parametrize("command", ["inspect run", "inspect run --check"])
def test_a_name_with_another_letter(originals, place, command):
    """A scale whose history has another name was a KeyError."""
    fresh(place, originals, "run")
    path = place / "run" / "checkpoints" / NEWEST / ".metadata"
    name = b"layers.0.self_attention.linear_proj.fp8_state.grad_output.amax_history"
    assert name in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(name, b"m" + name[1:]))
    forge(path.parent)
    assert "is damaged" in done_or_refused(*command.split()).refusal


@draws(5, often=2, suppress_health_check=[FIXTURES])
@given(json_edits(), st.sampled_from(COMMANDS))
def test_other_values_in_a_manifest(originals, place, edits, command):
    fresh(place, originals, "run", "config.yaml", "corpus.txt", "cache")
    folder = place / "run" / "checkpoints" / NEWEST
    content = json_edited(json.loads((folder / "manifest.json").read_text()), edits)
    try:
        write_manifest(folder, content)
    except (TypeError, ValueError):  # NaN, or no manifest any more: it has no checksum
        (folder / "manifest.json").write_text(json.dumps(content))
    done_or_refused(*command.split())


@pytest.mark.parametrize(
    "lacks", ["layout", "precision", "precision.fp8_recipe", "precision.params_dtype", "versions"]
)
def test_inspect_shows_what_a_manifest_has(originals, place, lacks):
    """One without a recipe's name was a KeyError."""
    fresh(place, originals, "run")
    folder = place / "run" / "checkpoints" / NEWEST
    content = json.loads((folder / "manifest.json").read_text())
    group, _, name = lacks.partition(".")
    del (content["facts"][group] if name else content["facts"])[name or group]
    write_manifest(folder, content)
    assert done_or_refused("inspect", "run").code == 0


@draws(3, suppress_health_check=[FIXTURES])
@given(byte_edits(), st.sampled_from(COMMANDS))
def test_other_bytes_in_latest(originals, place, edits, command):
    fresh(place, originals, "run", "config.yaml", "corpus.txt", "cache")
    path = place / "run" / "checkpoints" / "latest"
    path.write_bytes(edited(path.read_bytes(), edits))
    done_or_refused(*command.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_whole_checkpoint_is_taken(originals, place, command):
    """Else these tests would show nothing."""
    fresh(place, originals, "run", "config.yaml", "corpus.txt", "cache")
    forge(place / "run" / "checkpoints" / NEWEST)
    assert done_or_refused(*command.split()).code == 0
