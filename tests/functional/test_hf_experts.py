"""Mixtral, Qwen3-MoE and DeepSeek-V3: the same logits and tensors in transformers and Megatron-Core."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.commands.export import main as export_main
from megatron_fp8.commands.import_ import main as import_main
from tests.support.hf import (
    OF_EXPERTS,
    VOCAB,
    build,
    hf_logits,
    hf_model,
    loaded_logits,
    next_token_layer,
    stored_tensors,
    token_ids,
)
from tests.support.long_cases import some

FLOAT32 = ("--model.bf16=false", "--model.params_dtype=float32")
SEQUENTIAL, GROUPED = "--model.moe_grouped_gemm=false", "--model.moe_grouped_gemm=true"


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> dict[str, Any]:
    """By kind: (transformers' float32 model, its directory, the folder of the run that was imported from it)."""
    found = {}
    for kind in OF_EXPERTS:
        folder = tmp_path_factory.mktemp(kind)
        model = hf_model(kind)
        model.save_pretrained(folder / "hf")
        assert import_main([str(folder / "hf"), str(folder / "run")]) == 0
        found[kind] = (model, folder / "hf", folder / "run")
    return found


def check_logits(imported: Any, pool: RankPool, kind: str, layout: Layout, *fields: str) -> None:
    model, _, run = imported[kind]
    ids = token_ids()
    found = pool.run(loaded_logits, str(run / "config.yaml"), str(run), layout, ids, *FLOAT32, *fields)
    expected = hf_logits(model, ids)
    assert expected.std() > 0.3
    for logits in found:
        torch.testing.assert_close(logits[..., :VOCAB], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", OF_EXPERTS)
def test_an_imported_model_computes_the_same_logits(imported, ranks, kind):
    check_logits(imported, ranks(1), kind, Layout(), SEQUENTIAL if kind == "mixtral" else GROUPED)


LAYOUTS = {"ep2": Layout(ep=2), "tp2": Layout(tp=2, sp=True)}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", some(OF_EXPERTS, "deepseek_v3"))
def test_any_layout_reads_it(imported, ranks, kind, name):
    check_logits(imported, ranks(2), kind, LAYOUTS[name], GROUPED if kind == "mixtral" else SEQUENTIAL)


def rounded(model: Any) -> Any:
    """The model with weights in BF16's precision, as an export has them; the frequencies of positions stay."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    return model


@pytest.mark.parametrize("kind", OF_EXPERTS)
def test_transformers_reads_an_export_with_the_same_tensors(imported, tmp_path, kind):
    import transformers

    model, source, run = imported[kind]
    arguments = [str(run), str(tmp_path / "out"), f"--like={source}"]
    assert export_main(arguments) == 0
    before, after = stored_tensors(source), stored_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        bias = name.endswith("e_score_correction_bias")
        assert torch.equal(after[name], tensor if bias else tensor.bfloat16()), name
    assert export_main([str(run), str(tmp_path / "own")]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.float32)
    assert type(again) is type(model)
    ids = token_ids()
    torch.testing.assert_close(hf_logits(again, ids), hf_logits(rounded(model), ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [], "num_experts_per_tok": 3}),
        ("deepseek_v3", {"q_lora_rank": None, "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}),
        ("deepseek_v3", {"rope_interleave": False, "n_group": 1, "topk_group": 1, "n_shared_experts": 2}),
        ("deepseek_v3", {"v_head_dim": 32}),  # heads of queries and keys have 64
        ("deepseek_v3", {"v_head_dim": 96}),
    ],
    ids=["scores of all", "queries without a latent", "halves", "narrow values", "wide values"],
)  # fmt: skip
def test_other_settings(ranks, tmp_path, kind, fields):
    model = hf_model(kind, **fields)
    model.save_pretrained(tmp_path / "hf")
    assert import_main([str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    check_logits({kind: (model, None, tmp_path / "run")}, ranks(1), kind, Layout())
    assert export_main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0

    import transformers

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = hf_logits(rounded(model), ids := token_ids())
    torch.testing.assert_close(hf_logits(again, ids), expected, rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------------- multi-token prediction


def both_logits(config_file: str, checkpoint: str, ids: torch.Tensor) -> list[torch.Tensor]:
    """A case for one rank: float32 logits [batch, sequence, rows] of the token after the next, and of the next."""
    from megatron_fp8.files.checkpoint import find_checkpoint, read_manifest
    from megatron_fp8.mcore import checkpoint as checkpoints
    from megatron_fp8.mcore.runtime import unwrap

    with model_parallel(Layout()):
        _, chunks, optimizer = build(config_file, Layout(), *FLOAT32)
        folder = find_checkpoint(Path(checkpoint))
        checkpoints.load(folder, read_manifest(folder), chunks, optimizer)
        heard: list[torch.Tensor] = []
        model = unwrap(chunks[0]).eval()
        model.output_layer.register_forward_hook(  # a loss computes in its logits' memory
            lambda _module, _inputs, out: heard.append(out[0].transpose(0, 1).clone())
        )
        with torch.no_grad():
            model(ids, torch.arange(ids.shape[1]).expand_as(ids).contiguous(), None, labels=ids)
        return heard


def test_the_layer_of_multi_token_prediction_comes_and_goes(ranks, tmp_path):
    model = hf_model("deepseek_v3")
    model.save_pretrained(tmp_path / "hf")
    expected = next_token_layer(model, tmp_path / "hf", ids := token_ids())
    assert import_main([str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    further, following = ranks(1).run(
        both_logits, str(tmp_path / "run/config.yaml"), str(tmp_path / "run"), ids
    )[0]
    torch.testing.assert_close(following[..., :VOCAB], hf_logits(model, ids), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(further[:, :-1, :VOCAB], expected[:, :-1], rtol=1e-5, atol=1e-5)
    assert export_main([str(tmp_path / "run"), str(tmp_path / "out"), f"--like={tmp_path / 'hf'}"]) == 0
    before, after = stored_tensors(tmp_path / "hf"), stored_tensors(tmp_path / "out")
    assert before.keys() == after.keys() and "model.layers.2.shared_head.head.weight" in before
    for name, tensor in before.items():
        bias = name.endswith("e_score_correction_bias")
        assert torch.equal(after[name], tensor if bias else tensor.bfloat16()), name
