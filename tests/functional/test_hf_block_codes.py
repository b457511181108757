"""A DeepSeek-V3's directory in FP8, 128x128 blocks with float32 scales: its codes come in, train, and go out again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.support.ranks import Layout, model_parallel
from megatron_fp8.commands.export import main as export_main
from megatron_fp8.commands.import_ import main as import_main
from megatron_fp8.commands.inspect_checkpoint import main as inspect_main
from megatron_fp8.files.checkpoint import find_checkpoint, read_manifest
from tests.support.hf import build, hf_model, next_token_layer, stored_tensors, token_ids

STAYS = ("norm.weight", "gate.weight", "bias", "embed_tokens.weight", "head.weight", "eh_proj.weight")
CODES = (
    "--model.fp8=e4m3",
    "--model.fp8_format=blockwise",
    "--model.fp8_pow2_scales=false",
    "--model.fp8_param=true",
)


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as DeepSeek's own kernel makes them: amax / 448 of each block, the last ones cut."""
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -cols % 128, 0, -rows % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))  # [R, 128, C, 128]
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :cols]
    return codes.to(torch.float8_e4m3fn), scale


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """hf: DeepSeek's form, multi-token prediction included, sizes that blocks do not divide; run: imported from it."""
    folder = tmp_path_factory.mktemp("deepseek")
    model = hf_model(
        "deepseek_v3",
        torch.bfloat16,
        kv_lora_rank=160,
        moe_intermediate_size=256,
        n_routed_experts=4,
        n_group=2,
    )
    model.save_pretrained(folder / "hf")
    next_token_layer(model.float(), folder / "hf", token_ids(1))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in stored_tensors(folder / "hf").items():
        if name.endswith(STAYS):
            found[name] = tensor.float() if name.endswith("correction_bias") else tensor.bfloat16()
        else:
            found[name], found[f"{name}_scale_inv"] = in_blocks(tensor.float())
    assert sum(name.endswith("_scale_inv") for name in found) == 3 * 5 + 3 + 2 * 5 * 3
    save_file(found, folder / "hf" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "hf" / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    }  # fmt: skip
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    assert import_main([str(folder / "hf"), str(folder / "run")]) == 0
    return folder


def test_every_byte_goes_out_again(directory, tmp_path, capsys):
    assert import_main([str(directory / "hf"), str(tmp_path / "run")]) == 0
    assert "48 FP8 weights decoded (48 keep their scales beside them)" in capsys.readouterr().out
    assert inspect_main([str(tmp_path / "run")]) == 0 and "scales of FP8 weights" in capsys.readouterr().out
    arguments = [
        str(tmp_path / "run"),
        str(tmp_path / "out"),
        f"--like={directory / 'hf'}",
        "--format=fp8-block",
    ]
    assert export_main(arguments) == 0
    assert "48 linears in FP8" in capsys.readouterr().out
    before, after = stored_tensors(directory / "hf"), stored_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and after[name].shape == tensor.shape, name
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "model.layers.2.eh_proj" in config["quantization_config"]["modules_to_not_convert"]


def test_a_linear_that_is_left_out_goes_out_in_the_models_dtype(directory, tmp_path, capsys):
    arguments = [
        str(directory / "run"),
        str(tmp_path / "out"),
        f"--like={directory / 'hf'}",
        "--format=fp8-block",
    ]
    assert export_main([*arguments, "--ignore=*.q_a_proj"]) == 2
    said = capsys.readouterr().err
    for words in ("q_a_proj", "kv_a_proj_with_mqa", "as one GEMM", "ignored together"):
        assert words in said
    assert export_main([*arguments, "--ignore=*.q_a_proj", "--ignore=*.kv_a_proj_with_mqa"]) == 0
    after = stored_tensors(tmp_path / "out")
    left_out = [name for name in after if name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight"))]
    assert len(left_out) == 6 and {after[name].dtype for name in left_out} == {torch.bfloat16}
    assert not any(f"{name}_scale_inv" in after for name in left_out)


def live_codes(
    config_file: str, source: str, layout: Layout, *fields: str
) -> tuple[dict[str, Any], list[str]]:
    """A case for ranks: codes and scales of this rank's FP8 parameters by name, and what loading said."""
    from megatron_fp8.mcore import checkpoint
    from megatron_fp8.mcore.runtime import unwrap
    from megatron_fp8.params.fp8_parameter import Fp8Parameter

    with model_parallel(layout):
        _, chunks, optimizer = build(config_file, layout, *fields)
        folder = find_checkpoint(Path(source))
        notes = checkpoint.load(folder, read_manifest(folder), chunks, optimizer).notes
        found = {}
        for name, parameter in unwrap(chunks[0]).named_parameters():
            if isinstance(parameter, Fp8Parameter):
                side = parameter.quantized.rowwise
                amax = parameter.dequantize(torch.float32).abs().max()
                assert (parameter.cast_amax / amax - 1).abs() < 2**-4  # exactly, or of what was cast
                found[name] = (side.codes.view(torch.uint8).clone(), side.scale_inv.clone())
        return found, notes


def test_training_starts_from_the_codes(directory, ranks):
    config, run = str(directory / "run" / "config.yaml"), str(directory / "run")
    tensors = stored_tensors(directory / "hf")
    for rank, (found, notes) in enumerate(ranks(2).run(live_codes, config, run, Layout(ep=2), *CODES)):
        # attention, the dense MLP; two layers' two experts here and shared one
        kept = 3 * 5 + 2 + 2 * (2 * 2 + 2)
        assert len(found) == kept + 1  # multi-token prediction's eh_proj came in high precision
        assert f"{kept} weights on a rank keep the FP8 codes and scales that they came with" in notes
        for ours, theirs in (
            ("decoder.layers.1.mlp.experts.local_experts.1.linear_fc2", f"layers.1.mlp.experts.{2 * rank + 1}.down_proj"),
            ("decoder.layers.0.self_attention.linear_kv_down_proj", "layers.0.self_attn.kv_a_proj_with_mqa"),
            ("mtp.layers.0.transformer_layer.mlp.shared_experts.linear_fc2", "layers.2.mlp.shared_experts.down_proj"),
        ):  # fmt: skip
            codes, scale = found[f"{ours}.weight"]
            assert torch.equal(codes, tensors[f"model.{theirs}.weight"].view(torch.uint8)), ours
            assert torch.equal(scale, tensors[f"model.{theirs}.weight_scale_inv"]), ours
        codes, scale = found["decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"]
        both = [f"model.layers.1.mlp.experts.{2 * rank}.{part}_proj.weight" for part in ("gate", "up")]
        assert torch.equal(codes, torch.cat([tensors[name].view(torch.uint8) for name in both]))
        assert torch.equal(scale, torch.cat([tensors[f"{name}_scale_inv"] for name in both]))


@pytest.mark.parametrize(
    "fields",
    [(*CODES[:3], "--model.fp8_param=false"), (*CODES[:2], "--model.fp8_param=true"), ()],
    ids=["cast in each step", "powers of two", "BF16"],
)  # fmt: skip
def test_other_settings_decode_and_say_so(directory, ranks, fields):
    config, run = str(directory / "run" / "config.yaml"), str(directory / "run")
    ((_, notes),) = ranks(1).run(live_codes, config, run, Layout(), *fields)
    said = [note for note in notes if "came as FP8 and were decoded" in note]
    assert len(said) == 1 and "fp8_pow2_scales=false and fp8_param=true" in said[0]
    assert not any("delayed-scaling state" in note or "keep the FP8 codes" in note for note in notes)


def test_a_layout_that_cuts_blocks_takes_those_that_are_whole(directory, ranks):
    config, run = str(directory / "run" / "config.yaml"), str(directory / "run")
    whole, _ = ranks(1).run(live_codes, config, run, Layout(), *CODES)[0]
    for rank, (found, notes) in enumerate(
        ranks(2).run(live_codes, config, run, Layout(tp=2, sp=True), *CODES)
    ):
        assert any("keep the FP8 codes" in note for note in notes) and any(
            "were decoded" in note for note in notes
        )
        name = "decoder.layers.0.self_attention.linear_q_up_proj.weight"  # 256 rows
        for mine, all_ in zip(found[name], whole[name], strict=True):
            assert torch.equal(mine, all_.chunk(2)[rank])
