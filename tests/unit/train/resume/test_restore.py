"""A checkpoint's config is a stranger's: whatever its keys say, nothing is imported, made or called for it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fp8.diagnosis.replay import replay
from megatron_fp8.files.checkpoint import folder_name
from megatron_fp8.files.manifest import MANIFEST, Manifest
from megatron_fp8.train.config.model_section import transformer_config
from megatron_fp8.train.config.run_config import known_keys, parse
from megatron_fp8.train.launch import parallel
from megatron_fp8.train.launch.environment import Launch
from megatron_fp8.train.resume import checkpoint_compat
from megatron_fp8.train.resume.restore import keep_layers, refuse_its_code, restore, run_of

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "fp8": "hybrid"}
CODE = """
import pathlib
def leave(*names, **more):
    pathlib.Path({mark!r}).touch()
class Leaves:
    __init__ = leave
leave()
"""
NAMES: list[Any] = [
    "trap.leave",
    "trap.Leaves",
    {"class_path": "trap.Leaves"},
    {"class_path": "trap.Leaves", "init_args": {}},
    [{"class_path": "trap.Leaves"}],
    {"*": {"class_path": "trap.Leaves"}},
    "!!python/object/apply:trap.leave []",
]


@pytest.fixture(scope="module")
def mark(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A file that is there once the module `trap` was imported, or anything of it called."""
    folder = tmp_path_factory.mktemp("trap")
    (folder / "trap.py").write_text(CODE.format(mark=str(folder / "mark")))
    sys.path.insert(0, str(folder))
    yield folder / "mark"
    sys.path.remove(str(folder))
    sys.modules.pop("trap", None)


def built(saved: dict[str, Any], *options: str) -> None:
    """As generate, calibrate and diagnose make a model's config of a checkpoint's."""
    try:
        run = run_of(Path("checkpoint"), saved, None, list(options))
        refuse_its_code(Path("checkpoint"), saved["model"], run.model)
        transformer_config(run.model)
    except ValueError:
        pass


def with_key(key: str, value: Any) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    saved: dict[str, Any] = {"model": dict(MODEL)}
    (saved.setdefault(section, {}) if section else saved)[name] = value
    return saved


@pytest.mark.parametrize("key", known_keys())
def test_no_key_names_code(mark, key):
    for name in NAMES:
        built(with_key(key, name))
    assert not mark.exists() and "trap" not in sys.modules


def test_a_custom_recipe_of_a_checkpoint_waits_for_the_user(mark):
    custom = {**MODEL, "fp8_recipe": "custom", "fp8_quantizer_factory": "trap.leave"}
    for saved in (custom, {**MODEL, "fp8_quantizer_factory": "trap.leave", "fp8_overrides": {"*": "custom"}}):
        built({"model": saved})
        assert not mark.exists() and "trap" not in sys.modules
    run = run_of(Path("checkpoint"), {"model": custom}, None, ["--model.fp8_recipe=custom"])
    with pytest.raises(ValueError, match="code that a checkpoint names is not imported"):
        refuse_its_code(Path("checkpoint"), custom, run.model)
    built({"model": custom}, "--model.fp8_quantizer_factory=trap.leave")  # the user's own word
    assert mark.exists()
    mark.unlink()
    del sys.modules["trap"]


def test_what_a_run_writes_and_sends_is_not_the_checkpoints_to_say(tmp_path):
    saved = {
        "model": {**MODEL, "config_logger_dir": "/there"},
        "checkpoint": {"accept": ["model.num_layers"], "folder": "/there"},
        "telemetry": {"te_config": "/there", "wandb": True},
        "run_dir": "/there",
        "resume": "/there",
    }
    run = run_of(tmp_path, saved, None, [])
    assert run.telemetry == parse([]).telemetry and run.checkpoint.accept == []
    assert run.resume == "auto" and run.model.config_logger_dir == ""
    assert "there" not in run.run_dir


def test_the_same_layers_are_in_fp8_as_in_training() -> None:
    """What the guard had moved stays moved, and the size filter asks of the run's tokens, unless the config says more."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "fp8": "hybrid"}
    options = [f"--model.{name}={value}" for name, value in sizes.items()]
    options += ["--train.micro_batch_size=2", "--train.seq_length=64", "--train.global_batch_size=4"]
    manifest: Any = SimpleNamespace(state={"guard": [["fc1", "bf16", 3, "ill"], ["fc2", "mxfp8", 4, "ill"]]})
    run = parse([*options, "--model.fp8_guard=true", "--model.fp8_overrides={fc2: rowwise}"])
    keep_layers(run, manifest)
    assert run.model.fp8_overrides == {"fc1": "bf16", "fc2": "rowwise"}
    assert run.model.fp8_size_filter_tokens == 2 * 64
    run = parse([*options, "--model.fp8_size_filter_tokens=7"])
    keep_layers(run, manifest)
    assert not run.model.fp8_overrides and run.model.fp8_size_filter_tokens == 7


@pytest.mark.parametrize("command", ["restore", "replay"])
def test_ranks_agree_on_the_checkpoint_before_it_is_read(tmp_path, monkeypatch, command):
    """Each finds the newest one itself: of a run that trains meanwhile, halves of two would make one model."""
    run = parse(
        ["--config=tiny_gpt_cpu", "--model.tensor_model_parallel_size=1", "--model.sequence_parallel=false"]
    )
    folder = tmp_path / folder_name(3)
    folder.mkdir()
    files = {"x": {"bytes": 0, "sha256": "0" * 64}}
    Manifest(3, {"consumed_samples": 3}, {"run": run.to_dict()}, files).write(folder)
    agreed = {}

    def agree(what, facts, *_, **__):
        agreed[what] = facts
        if what == "checkpoint":
            raise ValueError("another one")

    monkeypatch.setattr(parallel, "join", lambda *_: pytest.fail("it goes on"))
    launch = Launch("one process", barrier=SimpleNamespace(agree=agree))
    work = {"restore": restore, "replay": replay}[command]
    with pytest.raises(ValueError, match="another one"):
        work(str(tmp_path), launch, [])
    assert f"the SHA-256 of {MANIFEST} of the checkpoint {folder.name}" in agreed["checkpoint"]


def test_a_recipe_that_an_earlier_version_left_to_its_default_stays(tmp_path: Path) -> None:
    """Without a name it was delayed; the manifest says so beside the run's config."""
    section = {**MODEL, "fp8_format": None, "fp8_recipe": None}
    facts = {"run": {"model": section}, "precision": {"fp8": "hybrid", "fp8_recipe": "delayed"}}
    saved = checkpoint_compat.run_of_manifest(Manifest(4, {}, facts))
    assert run_of(tmp_path, saved, None, []).model.fp8_recipe == "delayed"
    named = Manifest(4, {}, {**facts, "run": {"model": {**MODEL, "fp8_format": "delayed"}}})
    now = parse([f"--model.{name}={value}" for name, value in MODEL.items()])
    for manifest in (Manifest(4, {}, facts), named):
        changed = [str(change) for change in checkpoint_compat.may_change(now, manifest, [])]
        assert "model.fp8_recipe delayed -> tensorwise" in changed
