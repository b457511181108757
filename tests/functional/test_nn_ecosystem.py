"""Trainers and wrappers that others wrote, around a converted model: one FP8 iteration an optimizer step.

Each needs nothing but what docs/pytorch.md says of it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.nn import Fp8Linear, convert_to_fp8, fp8_state_dict, fp8_step, register_fp8_step
from tests.support.lightning_trainer import quiet_trainer

DATA = torch.arange(8 * 16).view(8, 16) % 31 + 1


def llama(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **options))


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def batch(seed: int) -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))


def by_hand(model: nn.Module, steps: int, microbatches: int = 2) -> nn.Module:
    """The loop that the trainers below are to be equal to: SGD on the mean loss of the microbatches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        for i in range(microbatches):
            (model(batch(step * microbatches + i)).square().mean() / microbatches).backward()
        fp8_step(model)
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_same_training(mine: nn.Module, other: nn.Module) -> None:
    ours, theirs = ({**m.state_dict(), **fp8_state_dict(m)} for m in (mine, other))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert_same_bytes(ours[name], theirs[name], name)


def iterations(model: nn.Module) -> set[int]:
    return {m.fp8_group.iteration for m in model.modules() if isinstance(m, Fp8Linear)}


def test_accelerate_with_accumulation():
    accelerate = pytest.importorskip("accelerate")
    from megatron_fp8.integrations.accelerate import register_fp8

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = convert_to_fp8(tower(), "delayed")
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    register_fp8(accelerator, prepared, optimizer)
    for i in range(6):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(batch(i)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert_same_training(model, by_hand(convert_to_fp8(tower(), "delayed"), 3))


def test_lightning_with_accumulation(tmp_path):
    """It runs the model in a closure inside of optimizer.step(), and closures of earlier microbatches outside."""
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.tower = convert_to_fp8(tower(), "delayed")

        def training_step(self, rows, index):
            return self.tower(rows[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer = quiet_trainer(tmp_path, max_steps=3, accumulate_grad_batches=2)
    trainer.fit(module, torch.utils.data.DataLoader([batch(i) for i in range(6)], batch_size=1))
    assert_same_training(module.tower, by_hand(convert_to_fp8(tower(), "delayed"), 3))


def test_grad_scaler():
    """A step that the scaler skips ends no iteration; the next that is taken settles both."""
    model = convert_to_fp8(tower(), "delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    register_fp8_step(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ended = []
    for i in range(4):
        loss = model(batch(i)).square().mean()
        scaler.scale(loss * (float("inf") if i == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ended += iterations(model)
    assert ended == [1, 1, 2, 3] and all(torch.isfinite(p).all() for p in model.parameters())


def test_moving_average():
    """torch's AveragedModel is a deep copy that nobody trains, with weights written in place."""
    model = convert_to_fp8(tower(), "delayed")
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    by_hand(model, 1)
    for _ in range(2):
        by_hand(model, 1)
        average.update_parameters(model)
        fresh = convert_to_fp8(tower())
        fresh.load_state_dict(average.module.state_dict())
        with torch.no_grad():
            assert_same_bytes(average.eval()(batch(0)), fresh.eval()(batch(0)))
    assert iterations(average) == {0} and iterations(model) == {3}


def test_peft_lora(tmp_path):
    """Adapters around frozen FP8 linears: trained, merged, and saved."""
    peft = pytest.importorskip("peft")
    model = convert_to_fp8(llama())
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "up_proj"]))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    register_fp8_step(optimizer, adapted)
    losses = []
    for _ in range(4):
        loss = adapted(input_ids=DATA, labels=DATA).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and iterations(model) == {4}
    apart = adapted.eval()(input_ids=DATA).logits
    merged = adapted.merge_and_unload()
    assert isinstance(merged.model.layers[0].mlp.up_proj, Fp8Linear)
    assert not torch.equal(merged.model.layers[0].mlp.up_proj.weight, before)
    together = merged(input_ids=DATA).logits
    assert (together - apart).norm() < 0.05 * apart.norm()
    merged.save_pretrained(tmp_path)
    again = convert_to_fp8(type(merged).from_pretrained(tmp_path)).eval()
    assert_same_bytes(again(input_ids=DATA).logits, together)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_save_pretrained_after_prepare_for_inference(family, tmp_path):
    """Weights that live as codes are written in high precision, as the model without FP8 has them."""
    transformers = pytest.importorskip("transformers")
    model = llama() if family == "Llama" else None
    if model is None:
        torch.manual_seed(0)
        config = transformers.GPT2Config(vocab_size=32, n_embd=32, n_layer=1, n_head=2, n_positions=16)
        model = transformers.GPT2LMHeadModel(config)
    prepare_for_inference(convert_to_fp8(model, "mxfp8", skip=()))
    logits = copy.deepcopy(model)(input_ids=DATA).logits
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path)
    assert (plain(input_ids=DATA).logits - logits).norm() < 0.1 * logits.norm()
    again = prepare_for_inference(convert_to_fp8(plain, "mxfp8", skip=()))
    assert_same_bytes(again(input_ids=DATA).logits, logits)  # codes of what codes mean are the same codes
