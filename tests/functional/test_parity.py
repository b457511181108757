"""megatron-fp8 parity: an export of a run has no difference; every planted one is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_fp8.commands.main import main
from tests.support.command import run
from tests.support.parity import CONFIG, edit_config, edit_tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """run: two iterations; served: its export."""
    folder = tmp_path_factory.mktemp("parity")
    (folder / "text.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 100)
    data = {"paths": [str(folder / "text.txt")], "split": "1,0,0", "cache_dir": str(folder / "cache")}
    (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "data": data}))
    done = run("-m", "megatron_fp8", "train", "--config", folder / "run.yaml", f"--run_dir={folder / 'run'}")
    assert done.returncode == 0, done.stderr
    assert main(["export", str(folder / "run"), str(folder / "served"), "--format=fp8-channel"]) == 0
    return folder


def parity(run: Path, served: Path, capsys: Any, *options: str) -> tuple[int, list[str]]:
    capsys.readouterr()
    code = main(["parity", str(run), str(served), *options])
    return code, capsys.readouterr().out.splitlines()


def test_an_export_differs_only_in_how_engines_scale_inputs(folder, capsys, tmp_path):
    code, out = parity(folder / "run", folder / "served", capsys, f"--json={tmp_path / 'all.json'}")
    assert code == 1 and [
        line for line in out if line.startswith("inputs: training e4m3 row pow2, engine e4m3 row fp32")
    ]
    assert out[-1] == "11 difference(s)"
    assert any("! e4m3 row pow2 x e4m3 row fp32" in line for line in out)
    assert sum("= high precision" in line for line in out) == 3
    content = json.loads((tmp_path / "all.json").read_text())
    assert len(content["gemms"]) == 14 and content["values"] > 10**5 and content["tensors"] == 14 + 11 + 7
    code, out = parity(folder / "run", folder / "served", capsys, "--accept=inputs")
    assert code == 0 and out[-1] == "no difference, and 11 accepted"


def test_export_names_parity_of_runs_alone(folder, capsys, tmp_path):
    """A checkpoint is no run, whose newest checkpoint may be another."""
    source = folder / "run"
    checkpoint = next((source / "checkpoints").glob("iter_*"))
    for path, named in ((source, True), (checkpoint, False)):
        out = tmp_path / path.name
        assert main(["export", str(path), str(out), "--format=fp8-channel"]) == 0
        assert (f"next: megatron-fp8 parity {path} {out}\n" in capsys.readouterr().out) == named
        assert main(["parity", str(path), str(out), "--accept=inputs"]) == (0 if named else 2)


DOWN = "model.layers.0.mlp.down_proj"


def one_code(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}.weight"].view(torch.uint8)[3, 5] ^= 1


def one_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}.weight_scale"][7] *= 2


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a code": (
        lambda p: edit_tensors(p, one_code),
        f"weights: training .* at \\[3, 5\\], the first of 1 values, .*{DOWN}.weight$",
    ),
    "a scale": (lambda p: edit_tensors(p, one_scale), f"weights: .* at \\[7, 0\\].*{DOWN}.weight_scale"),
    "a missing tensor": (
        lambda p: edit_tensors(p, lambda t: t.__delitem__("model.norm.weight")),
        "weights: training exported, engine missing: model.norm.weight",
    ),
    "one more tensor": (
        lambda p: edit_tensors(p, lambda t: t.update(other=torch.zeros(1))),
        "weights: training not exported, engine stored: other",
    ),
    "the ignore list": (
        lambda p: edit_config(p, ignore=["lm_head"]),
        "weights: training stored in high precision, engine reads it otherwise.*layers.1.mlp",
    ),
    "positions": (lambda p: edit_config(p, rope_theta=5.0), "config: training 10000.*, engine 5.0: rope_theta"),
    "norms": (lambda p: edit_config(p, rms_norm_eps=0.1), "config: training 1e-05, engine 0.1: rms_norm_eps"),
    "a window": (lambda p: edit_config(p, attention_bias=True), "config: .*attention_bias=True"),
    "length": (lambda p: edit_config(p, max_position_embeddings=8), "config: training sequences of 32, engine 8"),
    "end of text": (
        lambda p: edit_config(p, eos_token_id=7), "tokenizer: training 256, engine 7: config.json eos_token_id",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_planted_difference_is_named(folder, capsys, tmp_path, case):
    plant, words = CASES[case]
    shutil.copytree(folder / "served", tmp_path / "served")
    plant(tmp_path / "served")
    code, out = parity(folder / "run", tmp_path / "served", capsys, "--accept=inputs")
    assert code == 1 and any(re.search(words, line) for line in out), out


def test_a_directory_of_another_checkpoint_is_short_and_noted(folder, capsys, tmp_path):
    def change_all(tensors: dict[str, torch.Tensor]) -> None:
        for number, tensor in enumerate(tensors.values()):
            tensor.reshape(-1).view(torch.uint8)[number] ^= 1

    shutil.copytree(folder / "served", tmp_path / "served")
    edit_tensors(tmp_path / "served", change_all)
    code, out = parity(folder / "run", tmp_path / "served", capsys, "--accept=inputs")
    assert code == 1 and len([line for line in out if line.startswith("weights: ")]) == 9
    assert "weights: 24 more such lines; --json=FILE has all" in out
    assert any(
        re.match("note: 32 of 32 tensors differ: is it an export of the checkpoint '.*0002'", line)
        for line in out
    )


def test_a_finer_format_and_all_layers_are_differences_of_precision(folder, capsys, tmp_path):
    arguments = [str(folder / "run"), str(tmp_path / "served"), "--format=fp8-tensor", "--quantize-all"]
    assert main(["export", *arguments]) == 0
    code, out = parity(folder / "run", tmp_path / "served", capsys, "--accept=inputs", "--engine=sglang")
    assert code == 1
    assert any(
        line.startswith("precision: training e4m3 row pow2, engine e4m3 tensor fp32: ") for line in out
    )
    assert any(
        line.startswith("precision: training high precision, engine e4m3 tensor fp32: ") for line in out
    )
    code, out = parity(folder / "run", tmp_path / "served", capsys, "--accept=inputs", "--accept=precision:*")
    assert code == 0


def test_a_directory_in_high_precision_and_a_run_that_was_imported(folder, capsys, tmp_path):
    """As of a model with merged adapters: what was imported is compared, in high precision."""
    plain, again = tmp_path / "plain", tmp_path / "again"
    assert main(["export", str(folder / "run"), str(plain)]) == 0
    code, out = parity(folder / "run", plain, capsys, "--accept=precision", "--accept=inputs")
    assert code == 0 and out[-1] == "no difference, and 22 accepted"
    assert main(["import", str(plain), str(again)]) == 0
    code, out = parity(again, plain, capsys)
    assert "note: the run was imported and has not trained: its GEMMs are in high precision" in out
    assert code == 0 and sum("= high precision" in line for line in out) == 7
    code, out = parity(again, folder / "served", capsys, "--accept=inputs")
    assert code == 1 and any(
        line.startswith("precision: training high precision, engine e4m3") for line in out
    )
    shutil.copytree(folder / "run", tmp_path / "run")
    (tmp_path / "run" / "report.json").unlink()
    assert main(["parity", str(tmp_path / "run"), str(plain)]) == 2  # it has trained, nobody knows how


def test_bad_input(folder, capsys, tmp_path):
    assert main(["parity", str(folder / "run"), str(tmp_path)]) == 2
    assert main(["parity", str(tmp_path), str(folder / "served")]) == 2
    assert main(["parity", str(folder / "run"), str(folder / "served"), "--accept=colour"]) == 2
    assert (
        "--accept='colour' must be one of precision, inputs, cache, weights, config, tokenizer, numbers"
        in capsys.readouterr().err
    )
