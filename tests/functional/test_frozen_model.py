"""load_frozen: a quantized directory's own codes as frozen weights, and adapters that learn around them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.huggingface.directory import Tensors
from megatron_fp8.huggingface.frozen_model import load_frozen
from megatron_fp8.huggingface.weight_decoder import fp4_weights, read_weight
from megatron_fp8.inference import model_bytes
from megatron_fp8.nn import Fp8Linear, fp8_step
from megatron_fp8.serve import save_quantized

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

FORMATS = ("fp8-tensor", "fp8-channel", "fp8-block", "mxfp8", "nvfp4", "nvfp4-modelopt", "mxfp8-modelopt")
DATA = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def plain() -> Any:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 128}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3", **sizes, tie_word_embeddings=True)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=DATA).logits
    return found


def change(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("form", FORMATS)
def test_the_files_codes_are_the_weights(plain: Any, form: str, tmp_path: Path) -> None:
    """Codes and meaning are the file's, to the bit; adapters learn; scales that are no powers of two stay."""
    folder = tmp_path / "out"
    save_quantized(plain, folder, form)
    if form in ("fp8-channel", "fp8-block"):
        change(folder, lambda t: [s.mul_(1.1) for name, s in t.items() if "weight_scale" in name])
    model = load_frozen(folder)
    stored, linears = load_file(folder / "model.safetensors"), 0
    with Tensors(folder) as tensors:
        tensors.view_fp4(fp4_weights(tensors))
        for name, linear in model.named_modules():
            if isinstance(linear, Fp8Linear):
                linears += 1
                file = stored[f"{name}.weight{'_packed' if form == 'nvfp4' else ''}"]
                assert_same_bytes(linear.weight.codes[0], file.view(torch.uint8))
                value = read_weight(f"{name}.weight", tensors)
                assert_same_bytes(linear.weight.dequantize(torch.float32), value)
                assert_same_bytes(linear.weight.dequantize(), value.bfloat16())  # exact for powers of two
    up = model.model.layers[0].mlp.up_proj
    y = up(x := torch.randn(16, 128, generator=torch.Generator().manual_seed(5)).bfloat16())
    exact = x.float() @ up.weight.dequantize(torch.float32).t()
    assert (y - exact).norm() < (0.15 if form.startswith("nvfp4") else 0.04) * exact.norm()
    assert linears == 14 and not any(p.is_meta for p in model.parameters())
    assert model_bytes(model) < (0.45 if form.startswith("nvfp4") else 0.65) * model_bytes(plain)
    wanted = logits(plain)
    if form not in ("fp8-channel", "fp8-block"):  # there weights were changed
        assert (logits(model) - wanted).norm() < (0.4 if form.startswith("nvfp4") else 0.12) * wanted.norm()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(3):
        loss = adapted(input_ids=DATA, labels=DATA).loss
        loss.backward()
        fp8_step(adapted)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05


def missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def not_a_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.uint8)[3, 5] = 0xFF


def other_kind(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight_scale"] = torch.ones(1)


def unexpected(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.extra.weight"] = torch.ones(3)


REFUSED = {
    missing: "has no model.norm.weight",
    not_a_number: "no code may be NaN",
    other_kind: "scales of different kinds",
    unexpected: "mlp.extra.weight, which Qwen3ForCausalLM has not",
}


def test_refused(plain: Any, tmp_path: Path) -> None:
    for edit, message in REFUSED.items():
        folder = tmp_path / edit.__name__
        save_quantized(plain, folder, "fp8-channel")
        change(folder, edit)
        with pytest.raises(ValueError, match=message):
            load_frozen(folder)
    save_quantized(plain, tmp_path / "bf16")
    with pytest.raises(ValueError, match="has no quantized weight"):
        load_frozen(tmp_path / "bf16")
    config = json.loads((tmp_path / "missing" / "config.json").read_text())
    (tmp_path / "missing" / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}))
    with pytest.raises(ValueError, match="model_type='unheard_of'"):
        load_frozen(tmp_path / "missing")


def test_a_loaded_model_is_as_from_pretrained_gives_it(plain: Any, tmp_path: Path) -> None:
    """In evaluation mode, with the folder's generation_config.json and name; config.json has the dtype of the weights."""
    model = copy.deepcopy(plain).float()
    model.generation_config.eos_token_id = [2, 7]
    save_quantized(model, tmp_path / "out", "fp8-channel")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    found = load_frozen(tmp_path / "out")
    assert not found.training and found.generation_config.eos_token_id == [2, 7]
    assert found.config._name_or_path == found.name_or_path == str(tmp_path / "out")
