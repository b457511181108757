"""Directories of DeepSeek-V3's form that somebody changed by hand: what import says before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_fp8.commands.main import main
from tests.support.hf_experts import DEEPSEEK
from tests.support.hf_small import IN_BLOCKS, write, write_family

HEAD, COPY = "lm_head.weight", "model.layers.2.shared_head.head.weight"
SMALL = {
    **DEEPSEEK,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}


def directory(folder: Path, fields: dict[str, Any] | None = None, **changed: torch.Tensor | None) -> Path:
    """FP8 in blocks, multi-token prediction included; other fields, and tensors by name (None: left out)."""
    write_family(folder, {**SMALL, **IN_BLOCKS})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **(fields or {})}))
    held = {**load_file(folder / "model.safetensors"), **changed}
    save_file(
        {name: tensor for name, tensor in held.items() if tensor is not None}, folder / "model.safetensors"
    )
    return folder


def refused(capsys: Any, source: Path) -> str:
    """The one line that import says when it refuses, and leaves nothing behind."""
    capsys.readouterr()
    assert main(["import", str(source), str(source.parent / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    assert list(source.parent.iterdir()) == [source]
    return said


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_in_fp8_is_compared_by_what_it_means(tmp_path, capsys, tied):
    name = HEAD if tied else COPY
    codes, fields = torch.full([200, 64], 0.5).to(torch.float8_e4m3fn), {"tie_word_embeddings": tied}
    other = {name: codes, f"{name}_scale_inv": torch.full([2, 1], 3.0)}
    assert f"has a {name} of its own" in refused(capsys, directory(tmp_path / "hf", fields, **other))
    same = {name: codes, f"{name}_scale_inv": torch.full([2, 1], 2.0)}
    assert main(["import", str(directory(tmp_path / "hf", fields, **same)), str(tmp_path / "run")]) == 0


YARN = DEEPSEEK["rope_scaling"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_routed_experts": 64, "n_group": 8, "topk_group": 2, "num_experts_per_tok": 5},
         "n_routed_experts=64, n_group=8, topk_group=2, num_experts_per_tok=5: "),
        ({"n_routed_experts": 16, "n_group": 8, "topk_group": 2, "num_experts_per_tok": 5},
         "n_routed_experts=16, n_group=8, topk_group=2, num_experts_per_tok=5: "),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim=7: rotary positions turn pairs of channels, so it must be even."),
        ({"rope_scaling": None, "rope_theta": 1}, "rope_theta=1 must be a whole number of at least 2"),
        ({"rope_scaling": None, "rope_theta": 1e38}, "rope_theta=9999"),
        ({"rope_scaling": {**YARN, "beta_fast": 0, "beta_slow": 0}}, "beta_fast=0.0 must be"),
        ({"rope_scaling": {**YARN, "beta_slow": 64}}, "beta_slow=64.0, beta_fast=32"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "factor=0.5 must be a finite number of at least 1"),
        ({"rope_scaling": {**YARN, "factor": 1e7}}, "factor=10000000.0 must be"),
        ({"rope_scaling": {**YARN, "mscale": -1.0, "mscale_all_dim": -1.0}}, "mscale=-1.0 must be"),
    ],
)  # fmt: skip
def test_a_run_that_training_could_not_build_is_refused_first(tmp_path, capsys, fields, words):
    said = refused(capsys, directory(tmp_path / "hf", fields))
    assert "cannot build: " in said and words in said and "model." not in said and "hange it" not in said


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rms_norm_eps": 1e-40}, "rms_norm_eps=1e-40 must be a finite number of at least 1e-37 and at most 1."),
        ({"rms_norm_eps": 10.0}, "rms_norm_eps=10.0 must be"),
        ({"head_dim": 127}, "127 channels of a head (head_dim) makes 127, and rotary positions turn pairs."),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 0.5, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                           "original_max_position_embeddings": 8192}}, "factor=0.5 must be"),
    ],
)  # fmt: skip
def test_so_is_one_without_experts(tmp_path, capsys, fields, words):
    said = refused(capsys, write(tmp_path / "hf", fields))
    assert "cannot build: " in said and words in said
