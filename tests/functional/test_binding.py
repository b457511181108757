"""A checkpoint and the run that reads it: another model is refused by name, what may change is said, no code runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fp8.files.checkpoint import read_manifest
from tests.support.command import ROOT, run_each
from tests.support.manifests import edit
from tests.support.old_checkpoints import options, unpacked

Heard = dict[str, tuple[int, str, str]]
FACTORY = """
from pathlib import Path
from megatron_fp8.recipe import Float8CurrentScaling
Path("ran").touch()
def factory(role):
    return Float8CurrentScaling().rule(role)
"""
OTHER_MODEL = {
    "model.num_layers": ("1", "2 there and 1 here"),
    "model.num_attention_heads": ("4", "2 there and 4 here"),
    "model.rotary_base": ("500000", "10000 there and 500000 here"),
    "model.rotary_percent": ("0.5", "1.0 there and 0.5 here"),
    "model.position_embedding_type": ("none", "rope there and none here"),
    "model.activation_func": ("gelu", "silu there and gelu here"),
    "model.layernorm_epsilon": ("0.001", "1e-05 there and 0.001 here"),
    "model.share_embeddings_and_output_weights": ("true", "False there and True here"),
}
SHAPES = ("model.num_layers", "model.num_attention_heads", "model.share_embeddings_and_output_weights")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("binding")


def custom(content: dict[str, Any]) -> None:
    content["facts"]["run"]["model"].update(fp8_recipe="custom", fp8_quantizer_factory="own_factory.factory")


@pytest.fixture(scope="module")
def heard(folder) -> Heard:
    """(exit code, stderr, stdout) of each command below, on checkpoints of the version before this."""
    kept = unpacked("delayed", folder)
    (folder / "own_factory.py").write_text(FACTORY)
    config = folder / "other.yaml"
    config.write_text(
        yaml.safe_dump({"model": {**read_manifest(kept).facts["run"]["model"], "rotary_base": 7}})
    )
    other = json.loads((folder / "tokenizer.json").read_text())
    other["model"]["vocab"] = {word: 11 - number for word, number in other["model"]["vocab"].items()}
    (folder / "other.json").write_text(json.dumps(other))
    (folder / "longer.txt").write_text((folder / "corpus.txt").read_text() * 2)
    train = ["train", *options("delayed"), "--checkpoint.save_interval=1"]

    def run(name: str, change: Any = None) -> str:
        shutil.copytree(folder / "run", folder / name)
        if change is not None:
            edit(folder / name / "checkpoints" / kept.name, change)
        return name

    def trains(name: str, *more: str, change: Any = None) -> list[str]:
        return [*train, f"--run_dir={run(name, change)}", *more]

    generate = ["generate", run("coded", custom), "--prompt", "ham", "--max-new-tokens", "2"]
    asked = [*generate[:1], "run", *generate[2:]]
    commands: dict[str, list[str]] = {
        name: trains(f"{name} changed", f"--{name}={value}") for name, (value, _) in OTHER_MODEL.items()
    }
    commands |= {
        "accepted": trains("accepted", "--model.rotary_base=500000", "--checkpoint.accept=model.rotary_base"),
        "goes on": [*train, "--run_dir=accepted", "--model.rotary_base=500000", "--train.train_iters=5"],
        "other content": [*train, "--run_dir=accepted", "--model.rotary_base=500000", "--train.train_iters=6",
                          "--data.paths=[longer.txt]"],
        "other": trains("other", "--model.hidden_dropout=0", "--optimizer.lr=0.001", "--model.fp8_margin=1"),
        "accepts a shape": trains("shape", "--checkpoint.accept=model.num_layers", "--model.num_layers=3"),
        "accepts a typo": trains("typo", "--checkpoint.accept=model.rotary_bas"),
        "tokenizer": [*train, "--run_dir=accepted", "--model.rotary_base=500000", "--train.train_iters=5",
                      "--data.tokenizer=other.json"],
        "bytes": trains("bytes", "--data.tokenizer=null", "--model.padded_vocab_size=264"),
        "unknown field": trains("unknown", change=lambda c: c["facts"]["run"]["model"].update(new_gate=3)),
        "unknown and off": trains("off", change=lambda c: c["facts"]["run"]["model"].update(new_gate=False)),
        "older": trains("older", change=lambda c: c["facts"]["run"]["model"].pop("rotary_base")),
        "shallower": trains("shallower", "--model.num_layers=1", change=lambda c: c["facts"].pop("run")),
        "wider": trains("wider", "--model.ffn_hidden_size=64", change=lambda c: c["facts"].pop("run")),
        "no schedule": trains("unscheduled", change=lambda c: c["state"].pop("scheduler_steps")),
        "schedule ahead": trains("ahead", change=lambda c: c["state"].update(scheduler_steps=9)),
        "generate another": [*asked, "--model.rotary_base=7"],
        "generate accepted": [*asked, "--model.rotary_base=7", "--checkpoint.accept=model.rotary_base"],
        "generate config": [*asked, "--config=other.yaml"],
        "calibrate config": ["calibrate", "run", "--config=other.yaml"],
        "export config": ["export", "run", "out", "--config=other.yaml"],
        "inspect": ["inspect", "run"],
        "inspect accepted": ["inspect", "accepted", "--check"],
        "code": generate,
        "code in bf16": [*generate, "--recipe=bf16"],
        "code of calibrate": ["calibrate", "coded", "--batches=1"],
        "code of export": ["export", "coded", "coded-out"],
        "code of inspect": ["inspect", "coded"],
        "did code run": ["inspect", "ran"],
        "own code": [*generate, "--model.fp8_quantizer_factory=own_factory.factory"],
    }  # fmt: skip
    return run_each(folder, commands, cwd=folder, PYTHONPATH=f"{ROOT}:.")


def refused(heard: Heard, name: str) -> str:
    code, said, _ = heard[name]
    assert code == 2 and said.startswith("error: ") and len(said.splitlines()) == 1, (name, said)
    return said


@pytest.mark.parametrize("name", OTHER_MODEL)
def test_another_model_is_refused_by_name(heard, folder, name):
    said = refused(heard, name)
    assert f"is of another model: {name} is {OTHER_MODEL[name][1]}" in said
    assert ("No checkpoint can change its shape" in said) == (name in SHAPES)
    assert (f"--checkpoint.accept={name}" in said) == (name not in SHAPES)
    assert [path.name for path in (folder / f"{name} changed").rglob("iter_*")] == ["iter_0000002"]


WARNED = ("has no record of", "the tokenizer has no token for")
"""Of what these runs are: checkpoints without the records of their run, and one text twice, whose seam is no word."""


def unforeseen(said: str) -> list[str]:
    """The lines on stderr that these runs do not call for."""
    return [line for line in said.splitlines() if not any(words in line for words in WARNED)]


def test_an_accepted_change_is_said_and_recorded(heard, folder):
    code, said, printed = heard["accepted"]
    assert code == 0 and not unforeseen(said) and "model.rotary_base 10000 -> 500000" in printed
    assert "an earlier version, which had no checksum" in printed
    facts = read_manifest(folder / "accepted" / "checkpoints" / "iter_0000003").facts
    change = {"iteration": 2, "name": "model.rotary_base", "there": 10000, "here": 500000}
    assert facts["accepted"] == [change] and facts["run"]["checkpoint"]["accept"] == ["model.rotary_base"]
    code, said, printed = heard["goes on"]
    assert code == 0 and not unforeseen(said) and "500000" not in printed and "checksum" not in printed
    assert read_manifest(folder / "accepted" / "checkpoints" / "iter_0000005").facts["accepted"] == [change]
    assert "accepted    model.rotary_base: 10000 -> 500000 at iteration 2" in heard["inspect accepted"][2]


def test_what_may_change_is_said_in_a_line(heard):
    code, said, printed = heard["other"]
    assert code == 0 and not unforeseen(said)
    (line,) = [line for line in printed.splitlines() if "not as it was" in line]
    for words in ("fp8_margin 0 -> 1", "hidden_dropout 0.1 -> 0.0", "optimizer.lr 0.01 -> 0.001"):
        assert words in line


def test_data_are_compared_by_content(heard):
    assert "content of data.paths" not in heard["goes on"][2]
    code, said, printed = heard["other content"]
    assert code == 0 and not unforeseen(said) and ", the content of data.paths " in printed
    assert printed.count("content of data.paths") == 2  # what changed, and that the order depends on it


def test_only_what_can_be_accepted_is(heard):
    assert "No checkpoint can change its shape (model.num_layers)" in refused(heard, "accepts a shape")
    assert "Did you mean model.rotary_base?" in refused(heard, "accepts a typo")


def test_another_tokenizer_is_refused(heard):
    assert "data.tokenizer is json-" in refused(heard, "tokenizer")
    assert "data.tokenizer is tokenizer.json there and bytes here" in refused(heard, "bytes")


def test_fields_of_other_versions(heard):
    assert "model.new_gate is 3 there and None here" in refused(heard, "unknown field")
    assert "This version does not know model.new_gate" in refused(heard, "unknown field")
    for name in ("unknown and off", "older"):
        assert heard[name][0] == 0 and not unforeseen(heard[name][1])


def test_tensors_say_what_the_manifest_does_not(heard):
    """Of a checkpoint that was saved from Python, which does not say what run it is of."""
    assert "it has decoder.layers.1." in refused(heard, "shallower")
    assert "[32, 16] there and [64, 16] here" in refused(heard, "wider")


def test_numbers_that_do_not_fit_together_are_refused(heard):
    assert "has no scheduler_steps" in refused(heard, "no schedule")
    assert "scheduler_steps 9 after iteration 2" in refused(heard, "schedule ahead")


def test_commands_on_a_checkpoint_refuse_another_model_too(heard):
    for name in ("generate another", "generate config", "calibrate config", "export config"):
        assert "model.rotary_base is 10000 there and 7 " in refused(heard, name)
    code, said, _ = heard["generate accepted"]
    assert code == 0 and "model.rotary_base 10000 -> 7" in said and "no checksum" in said
    assert heard["inspect"][0] == 0 and "no checksum" in heard["inspect"][2]


def test_a_checkpoint_runs_no_code(heard, folder):
    for name in ("code", "code of calibrate"):
        said = refused(heard, name)
        assert "not imported" in said and "--model.fp8_quantizer_factory=own_factory.factory" in said
    for name in ("code in bf16", "code of inspect", "code of export"):
        assert heard[name][0] == 0, heard[name]
    assert "there is no such folder" in refused(heard, "did code run")  # nothing had made it yet
    assert heard["own code"][0] == 0 and (folder / "ran").exists()
