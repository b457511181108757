"""Manifests: what is written is read, what is not what was written is refused in one line, whatever it is."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import pytest

from megatron_fp8.files.checkpoint import expert_override_notes, missing_checksum_note
from megatron_fp8.files.manifest import FORMAT, Manifest, NotAManifest, is_plain_name, parse

FILE = {"bytes": 3, "sha256": "0" * 64}
STATE = {
    "optimizer_step": 2, "fp8_iteration": 2, "scheduler_steps": 3, "consumed_samples": 4, "loss_scaler": None,
}  # fmt: skip
FACTS = {
    "layout": {"tensor": 1, "virtual_pipeline": None, "sequence_parallel": False},
    "precision": {"fp8": "hybrid"},
    "versions": {"torch": "2.13.0"},
    "run": {"model": {"num_layers": 2, "layernorm_epsilon": 1e-05}, "run_dir": "runs/ü"},
}
MADE = Manifest(2, STATE, FACTS, {".metadata": FILE, "__0_0.distcp": FILE})
DATA = MADE.text().encode()


def earlier(**changes: Any) -> bytes:
    """The manifest as the first version wrote it, without a checksum, with some of its keys changed."""
    content = {**json.loads(DATA), "version": 1, **changes}
    del content["sha256"]
    return json.dumps(content, indent=1).encode()


def test_what_is_written_is_read():
    assert parse(DATA) == MADE and parse(DATA).checked
    assert parse(json.dumps(json.loads(DATA)).encode()) == MADE  # not indented
    assert parse(earlier()) == MADE and not parse(earlier()).checked
    assert "no checksum" in missing_checksum_note(parse(earlier()))[0] and not missing_checksum_note(
        parse(DATA)
    )
    with pytest.raises(ValueError):
        Manifest(2, {"lr": float("nan")}).text()


def numbered_from_0(experts: Any, ranks: Any) -> Manifest:
    """Read from a version 2 in which each of ``ranks`` counted its experts from 0."""
    model = {
        "num_moe_experts": experts,
        "fp8_overrides": {"*.local_experts.0.linear_fc?": "bf16", "*.linear_proj": "bf16"},
    }
    moves = [["a.local_experts.1.linear_fc1", "bf16", 3, "ill"], ["b.linear_fc1", "bf16", 4, "ill"]]
    facts = {"layout": {"expert": ranks}, "run": {"model": model}}
    content = json.loads(Manifest(2, {"guard": moves}, facts, MADE.files).text())
    del content["sha256"]
    content["version"] = 2
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return parse(json.dumps({**content, "sha256": hashlib.sha256(plain.encode()).hexdigest()}).encode())


def test_names_of_experts_from_when_each_rank_counted_its_own():
    """One was an expert of every rank."""
    found = numbered_from_0(6, 3)
    sites = [f"a.local_experts.{e}.linear_fc1" for e in (1, 3, 5)]
    moves = [[site, "bf16", 3, "ill"] for site in sites]
    assert found.state["guard"] == [*moves, ["b.linear_fc1", "bf16", 4, "ill"]]
    overrides = [f"*.local_experts.{e}.linear_fc?" for e in (0, 2, 4)]
    assert list(found.facts["run"]["model"]["fp8_overrides"]) == [*overrides, "*.linear_proj"]
    assert found.checked and parse(found.text().encode()) == found
    (line,) = expert_override_notes(found, ["*.local_experts.0.linear_fc?", "*.linear_proj"])
    assert f"one on each rank, {', '.join(overrides)}: name all of them" in line
    assert not expert_override_notes(found, [*overrides, "*.linear_proj"]) and not expert_override_notes(
        found, []
    )
    assert not expert_override_notes(parse(found.text().encode()), overrides[:1]), (
        "saved anew, it has today's names"
    )
    for experts, ranks in [(6, 1), (None, 3), (2, 3), ("6", 3), (6, True), (2**62, 2**40)]:
        unchanged = numbered_from_0(experts, ranks).state["guard"]
        assert [move[0] for move in unchanged] == ["a.local_experts.1.linear_fc1", "b.linear_fc1"]


def test_every_changed_byte_and_every_cut_is_found():
    """A flipped bit anywhere, unless it is in what JSON does not mean: white space."""
    rng = random.Random(0)
    for place in range(len(DATA)):
        damaged = bytearray(DATA)
        damaged[place] ^= 1 << rng.randrange(8)
        with pytest.raises(ValueError) as error:
            parse(bytes(damaged))
            assert bytes(damaged).split() == DATA.split(), damaged[place - 20 : place + 20]
            raise ValueError("only white space")
        assert len(str(error.value).splitlines()) == 1
    for length in (0, len(DATA) // 2, len(DATA) - 3):
        with pytest.raises(ValueError):
            parse(DATA[:length])


def edited(**changes: Any) -> bytes:
    return json.dumps({**json.loads(DATA), **changes}).encode()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (edited(state={**STATE, "consumed_samples": 5}), "its checksum differs"),
        (edited(version=1), "its checksum differs"),
        (DATA.replace(b"1e-05", b"NaN"), "NaN is no number"),
        (earlier(iteration=True), "iteration is 'True', and that is a whole number from 0"),
        (earlier(iteration=2**70), "iteration is '1180591620717411303424'"),
        (earlier(state=[]), "state is '[]', and that is an object"),
        (earlier(state={"scheduler_steps": -3}), "state.scheduler_steps is '-3'"),
        (earlier(state={"loss_scaler": [1]}), "state.loss_scaler is '[1]'"),
        (earlier(state={"loss_scaler": {"scale": "1"}}), "state.loss_scaler.scale is '1', and that is a finite number"),
        (earlier(state={"guard": [["fc1", None, 3, "ill"]]}), "state.guard[1] is"),
        (earlier(state={"guard": [["fc1", "bf16", "3", "ill"]]}), "state.guard[1] is"),
        (earlier(state={"left_out": [{"first": 3}]}), "it has no state.left_out[1].last"),
        (earlier(state={"left_out": [{"first": 3, "last": 3}]}), "state.left_out has a range that ends before it begins"),
        (earlier(facts={"run": {"model": "/etc/model.yaml"}}), "facts.run.model is '/etc/model.yaml'"),
        (earlier(facts={"run": {"data": {"tokenizer": 3}}}), "facts.run.data.tokenizer is '3', and that is a text"),
        (earlier(facts={"layout": {"tensor": []}}), "facts.layout.tensor is '[]'"),
        (earlier(facts={"accepted": [{}]}), "it has no facts.accepted[1].iteration"),
        (earlier(facts={"tokenizer": 3}), "facts.tokenizer is '3'"),
        (earlier(facts={"run": {"run_dir": "\ud800"}}), "no text"),
        (earlier(files={}), "'files' is empty"),
        (earlier(files={"../../secret": FILE}), "'../../secret' in 'files' is not the name of a file beside it"),
        (earlier(files={"a": {"bytes": 1}}), "it has no files.a.sha256"),
        (earlier(files={"a": {**FILE, "sha256": "x"}}), "files.a.sha256 is 'x', and that is 64 hexadecimal digits"),
    ],
)  # fmt: skip
def test_damage_is_named(data, words):
    with pytest.raises(ValueError) as error:
        parse(data)
    assert words in str(error.value) and not isinstance(error.value, NotAManifest)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("content", [[], 3, {"format": "other"}, {"format": FORMAT, "version": True}])
def test_something_else_is_no_manifest(content):
    with pytest.raises(NotAManifest):
        parse(json.dumps(content).encode())


def test_names_that_lead_out_are_no_plain_names():
    assert all(map(is_plain_name, (".metadata", "__12_0.distcp", "common.pt")))
    assert not any(map(is_plain_name, ("", ".", "..", "a/b", "/a", "..\\a", "a\0", "a\n", "~", 3, None)))
