"""The same weights, the same logits: transformers beside Megatron-Core, imported and exported."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.support.ranks import Layout, model_parallel
from megatron_fp8.commands.export import main as export_main
from megatron_fp8.commands.import_ import main as import_main
from megatron_fp8.files.checkpoint import Manifest
from tests.support.hf import (
    KINDS,
    VOCAB,
    build,
    hf_logits,
    hf_model,
    loaded_logits,
    megatron_logits,
    token_ids,
)

FLOAT32 = ("--model.bf16=false", "--model.params_dtype=float32")


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> dict[str, Any]:
    """By kind: (transformers' float32 model, the folder of the run that was imported from it)."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        extra: dict[str, Any] = {"tie_word_embeddings": True} if kind == "qwen3" else {}
        if kind == "llama":
            extra["rope_parameters"] = {
                "rope_type": "llama3", "rope_theta": 50000.0, "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            }  # fmt: skip
        model = hf_model(kind, **extra)
        model.save_pretrained(folder / "hf")
        assert import_main([str(folder / "hf"), str(folder / "run")]) == 0
        found[kind] = (model, folder / "run")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_model_computes_the_same_logits(imported, ranks, kind):
    model, run = imported[kind]
    ids = token_ids()
    (logits,) = ranks(1).run(loaded_logits, str(run / "config.yaml"), str(run), Layout(), ids, *FLOAT32)
    expected = hf_logits(model, ids)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits[..., :VOCAB], expected, rtol=1e-5, atol=1e-5)
    assert logits.shape[-1] == 384 and not logits[..., VOCAB:].any()


@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True), Layout(pp=2)], ids=["tensor", "pipeline"])
def test_any_layout_reads_an_imported_model(imported, ranks, layout):
    """Qwen3's embedding is tied: on two pipeline stages there are two of it."""
    model, run = imported["qwen3"]
    ids = token_ids()
    logits = ranks(2).run(loaded_logits, str(run / "config.yaml"), str(run), layout, ids, *FLOAT32)[-1]
    torch.testing.assert_close(logits[..., :VOCAB], hf_logits(model, ids), rtol=1e-5, atol=1e-5)


def save_case(config_file: str, folder: str, layout: Layout, ids: torch.Tensor) -> Any:
    """Save a model whose vectors are not at their defaults; its logits."""
    from megatron_fp8.mcore import checkpoint
    from megatron_fp8.mcore.checkpoint.saver import Saver

    with model_parallel(layout):
        run, chunks, optimizer = build(config_file, layout, *FLOAT32, "--model.init_method_std=0.06")
        with torch.no_grad():
            for name, parameter in chunks[0].named_parameters():
                if parameter.dim() == 1:
                    own = zlib.crc32(name.encode()) % 100  # queries and keys have other norms
                    spread = (torch.arange(parameter.numel()) + own).sin() * 0.3
                    parameter.add_(spread if "bias" not in name else spread * (1 + ps_rank()))
        state = checkpoint.numbers(chunks, optimizer) | {"scheduler_steps": 1, "consumed_samples": 0}
        facts = {**checkpoint.layout_facts(chunks), "run": run.to_dict()}
        saver = Saver(Path(folder))
        saver.save(checkpoint.sharded_state(chunks, optimizer), Manifest(5, state, facts))
        saver.close()
        return megatron_logits(chunks[0], ids)


def ps_rank() -> int:
    """This rank's place in its tensor-parallel group."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank()


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_computes_the_same_logits(imported, ranks, tmp_path, kind):
    """Saved by two ranks, each kind in another layout; read by transformers."""
    layout = {
        "llama": Layout(pp=2),
        "mistral": Layout(),
        "qwen2": Layout(tp=2, sp=True),
        "qwen3": Layout(tp=2),
    }[kind]
    ids, config = token_ids(), imported[kind][1] / "config.yaml"
    logits = ranks(2).run(save_case, str(config), str(tmp_path / "saved"), layout, ids)[-1][..., :VOCAB]
    # A Mistral is a Llama by another name, which only its directory says.
    like = [f"--like={imported[kind][1].parent / 'hf'}"] if kind == "mistral" else []
    assert export_main([str(tmp_path / "saved"), str(tmp_path / "out"), "--max-shard-size=1MB", *like]) == 0
    assert len(list(tmp_path.glob("out/*.safetensors"))) > 2

    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32 and model.config.model_type == kind
    assert logits.std() > 0.3
    torch.testing.assert_close(logits, hf_logits(model, ids), rtol=1e-5, atol=1e-5)
