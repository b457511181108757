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
from tests.support.hf_small import IN_BLOCKS, refused, write, write_family

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


def not_imported(capsys: Any, source: Path) -> str:
    """The one line that import says when it refuses, and leaves nothing behind."""
    said = refused(capsys, "import", source, source.parent / "run")
    assert list(source.parent.iterdir()) == [source]
    return said


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_in_fp8_is_compared_by_what_it_means(tmp_path, capsys, tied):
    name = HEAD if tied else COPY
    codes, fields = torch.full([200, 64], 0.5).to(torch.float8_e4m3fn), {"tie_word_embeddings": tied}
    other = {name: codes, f"{name}_scale_inv": torch.full([2, 1], 3.0)}
    refusal = "has a lm_head.weight other than its embedding" if tied else f"has a {name} of its own"
    assert refusal in not_imported(capsys, directory(tmp_path / "hf", fields, **other))
    same = {name: codes, f"{name}_scale_inv": torch.full([2, 1], 2.0)}
    assert main(["import", str(directory(tmp_path / "hf", fields, **same)), str(tmp_path / "run")]) == 0
    said = f"1 tensor(s) go out as what they are copies of, and are stored otherwise here ({COPY})"
    assert (said in capsys.readouterr().out) != tied


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
    said = not_imported(capsys, directory(tmp_path / "hf", fields))
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
    said = not_imported(capsys, write(tmp_path / "hf", fields))
    assert "cannot build: " in said and words in said


def round_trip(source: Path) -> dict[str, torch.Tensor]:
    """What --format=fp8-block makes of the imported directory."""
    out = source.parent / "out"
    assert main(["import", str(source), str(source.parent / "run")]) == 0
    assert (
        main(["export", str(source.parent / "run"), str(out), "--format=fp8-block", f"--like={source}"]) == 0
    )
    return load_file(out / "model.safetensors")


Q, EXPERT = "model.layers.0.self_attn.q_a_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"


def test_floats_beside_the_codes_go_out_as_they_came(tmp_path, capsys):
    changed: dict[str, Any] = {
        HEAD: torch.full([200, 64], 1 / 3),
        COPY: torch.full([200, 64], 1 / 3),
        "model.norm.weight": torch.full([64], 1 / 3).half(),
        EXPERT: torch.full([32, 64], 1 / 3),
        f"{EXPERT}_scale_inv": None,
    }
    source = directory(tmp_path / "hf", **changed)
    before, after = load_file(source / "model.safetensors"), round_trip(source)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(
            after[name].view(torch.uint8), tensor.view(torch.uint8)
        ), name
    said = capsys.readouterr().out
    assert "3 tensor(s) beside the FP8 weights are float32 or float16 (" in said and HEAD in said


def test_scales_that_are_not_kept_are_named_and_why(tmp_path, capsys):
    head = {HEAD: torch.ones(200, 64).to(torch.float8_e4m3fn), f"{HEAD}_scale_inv": torch.ones(2, 1)}
    changed = {f"{Q}_scale_inv": torch.ones(1, 1).bfloat16(), **head}
    source = directory(tmp_path / "hf", **changed)
    assert main(["import", str(source), str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    for words in (
        f"scales of 1 FP8 weight(s) are not kept ({Q}): its scales are torch.bfloat16",
        f"({HEAD}): no export has it in FP8",
    ):
        assert words in said
    export = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format=fp8-block"]
    assert main(export) == 2
    assert (
        "were not stored (its scales are torch.bfloat16, and not float32), and new ones"
        in capsys.readouterr().err
    )


def test_rows_that_were_put_in_pairs_are_the_reason(tmp_path, capsys):
    source = directory(tmp_path / "hf", {"rope_interleave": False})
    assert main(["import", str(source), str(tmp_path / "run")]) == 0
    assert "scales of 6 FP8 weight(s) are not kept (" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format=fp8-block"]) == 2
    assert "rows were put in pairs, since rope_interleave=false" in capsys.readouterr().err


def test_what_a_directory_says_of_scales_is_said_again(tmp_path, capsys):
    said_there = {
        "quantization_config": {**IN_BLOCKS["quantization_config"], "scale_fmt": "ue8m0", "other": 1}
    }
    source = directory(tmp_path / "hf", said_there)
    round_trip(source)
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["scale_fmt"] == "ue8m0" and "other" not in written
    assert "quantization_config of --like has other=1, which the export has not" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["input_scale", "activation_scale", "act_scale"])
def test_scales_of_inputs_are_left_out_in_a_line(tmp_path, capsys, name):
    static = {"quantization_config": {**IN_BLOCKS["quantization_config"], "activation_scheme": "static"}}
    layer = "model.layers.0.self_attn"
    inputs = {
        f"{layer}.{last}": torch.ones(1) for last in (f"q_a_proj.{name}", "q_a_proj.output_scale", "k_scale")
    }
    round_trip(directory(tmp_path / "hf", static, **inputs))
    said = capsys.readouterr().out
    assert f"inputs are left out (1 tensor(s), such as {layer}.q_a_proj.{name}; activation_scheme=" in said
    assert f"outputs and of an FP8 cache are left out (2 tensor(s), such as {layer}.k_scale)" in said
    assert "--like has activation_scheme='static', and the export activation_scheme='dynamic'" in said


def test_tensors_that_the_index_does_not_name_are_refused(tmp_path, capsys):
    source = directory(tmp_path / "hf")
    held = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    places = {name: "b.safetensors" if name == Q else "a.safetensors" for name in held}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for extra in (Q.replace("weight", "bias"), Q):  # which the index does not have, or has in the other file
        rest = {name: tensor for name, tensor in held.items() if name != Q}
        save_file({**rest, extra: torch.ones(24, 64)}, source / "a.safetensors")
        save_file({Q: held[Q]}, source / "b.safetensors")
        said = not_imported(capsys, source)
        assert f"a.safetensors' has {extra}, and its index does not say so" in said
    save_file(
        {**rest, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, source / "a.safetensors"
    )
    assert main(["import", str(source), str(tmp_path / "run")]) == 0


def test_a_file_that_no_index_names_is_said(tmp_path, capsys):
    source = directory(tmp_path / "hf")
    save_file({"stale.weight": torch.ones(2)}, source / "model-00004-of-00003.safetensors")
    assert main(["import", str(source), str(tmp_path / "run")]) == 0
    assert (
        "1 file(s) of tensors are there and not read (model-00004-of-00003.safetensors)"
        in capsys.readouterr().out
    )
