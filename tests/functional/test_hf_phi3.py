"""Phi-3's form: several matrices in one tensor, taken apart row by row as they are read; a Llama goes out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.support.ranks import Layout
from megatron_fp8.commands.export import main as export_main
from megatron_fp8.commands.import_ import main as import_main
from tests.support.hf import VOCAB, hf_logits, hf_model, loaded_logits, token_ids

FLOAT32 = ("--model.bf16=false", "--model.params_dtype=float32")
QKV = "model.layers.1.self_attn.qkv_proj.weight"


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> tuple[Any, Path]:
    """transformers' model, BF16 values in float32, and the folder of its directory and run."""
    folder = tmp_path_factory.mktemp("phi3")
    hf_model("phi3", torch.bfloat16, pad_token_id=0).save_pretrained(folder / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    assert type(model).__name__ == "Phi3ForCausalLM"
    assert import_main([str(folder / "hf"), str(folder / "run")]) == 0
    return model, folder


def test_an_imported_model_computes_the_same_logits(imported, ranks):
    model, folder = imported
    run, ids = folder / "run", token_ids()
    (logits,) = ranks(1).run(loaded_logits, str(run / "config.yaml"), str(run), Layout(), ids, *FLOAT32)
    expected = hf_logits(model, ids)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits[..., :VOCAB], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("like", [False, True])
def test_it_goes_out_as_a_llama(imported, tmp_path, like):
    model, folder = imported
    options = [f"--like={folder / 'hf'}"] if like else []
    assert export_main([str(folder / "run"), str(tmp_path / "out"), *options]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(exported).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(
        hf_logits(exported, token_ids()), hf_logits(model, token_ids()), rtol=1e-5, atol=1e-5
    )


def test_what_cannot_be_taken_apart_is_refused(imported, tmp_path, capsys):
    _, folder = imported
    tensors = load_file(folder / "hf" / "model.safetensors")
    config = json.loads((folder / "hf" / "config.json").read_text())
    fp8 = {"quantization_config": {"quant_method": "fp8"}}
    windowed = {"sliding_window": 7}
    partial = {"rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": 0.75}}
    for number, (fields, changed, words) in enumerate(
        (
            ({}, {QKV: None}, f"has no {QKV}, which"),
            ({}, {QKV: tensors[QKV][:-1].clone()}, f"{QKV} has 1023 rows in "),
            (fp8, {}, "Phi3ForCausalLM holds several matrices as one"),
            (windowed, {}, "sliding_window=7"),
            (partial, {}, "partial_rotary_factor=0.75"),
        )
    ):
        source = tmp_path / str(number)
        shutil.copytree(folder / "hf", source)
        (source / "config.json").write_text(json.dumps({**config, **fields}))
        kept = {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}
        save_file(kept, source / "model.safetensors")
        capsys.readouterr()
        assert import_main([str(source), str(tmp_path / "run")]) == 2
        assert words in capsys.readouterr().err
