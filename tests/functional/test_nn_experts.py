"""Mixtures of experts of transformers in FP8: whole models, and two ranks under DDP and fully_shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.compare import assert_same_bytes
from benchmarks.support.ranks import RankPool
from megatron_fp8.nn import convert_to_fp8, fp8_state_dict, fp8_step
from tests.support.long_cases import some

SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "num_experts_per_tok": 2, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = 4
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 48},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS, "moe_intermediate_size": 48, "first_k_dense_replace": 1, "n_group": 2,
        "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
}  # fmt: skip


def build(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SMALL, **MODELS[name])
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


def tokens() -> torch.Tensor:
    return torch.randint(3, 128, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", some(MODELS, "mixtral", "deepseek_v3"))
def test_a_model_trains_generates_and_is_saved(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from megatron_fp8.inference import prepare_for_inference

    model, ids = build(name), tokens()
    keys, plain = list(model.state_dict()), model(ids).logits.detach()
    convert_to_fp8(model, "blockwise")
    layers = range(MODELS[name].get("first_k_dense_replace", 0), 2)
    sites = {
        f"model.layers.{i}.mlp.experts.{e}.{of}"
        for i in layers
        for e in range(EXPERTS)
        for of in ("gate_up", "down")
    }
    report = model.fp8_report
    assert {site for site in report.converted if ".experts." in site} == sites
    for i in layers:
        assert report.skipped[f"model.layers.{i}.mlp.gate"].startswith("a router")
    assert not [why for why in report.skipped.values() if "not known" in why]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(4):
        loss = model(ids, labels=ids).loss
        loss.backward()
        if not losses:
            assert all(p.grad is not None for p in model.parameters())
            assert (model(ids).logits - plain).float().norm() < 0.08 * plain.float().norm()
        assert fp8_step(model).hp_gemms == 0
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        wanted = model.eval()(ids).logits
        prepare_for_inference(model)
        assert_same_bytes(model(ids).logits, wanted)
        assert model.generate(ids[:, :5], max_new_tokens=3, do_sample=False).shape == (2, 8)
        model.save_pretrained(tmp_path)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert (saved(ids).logits - wanted).float().norm() < 0.08 * wanted.float().norm()


def test_adapters_beside_experts_and_on_their_parameters() -> None:
    """Adapters of a parameter make it anew in each call, out of its low ranks."""
    peft = pytest.importorskip("peft")
    model, ids = convert_to_fp8(build("deepseek_v3"), "tensorwise"), tokens()
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["o_proj"], target_parameters=parameters)
    )
    adapted(ids, labels=ids).loss.backward()
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert all(adapted.get_parameter(name).grad is not None for name in trained)
    assert any(".experts." in name for name in trained if "shared" not in name)
    assert fp8_step(adapted).fp8_gemms > 0


# ------------------------------------------------------------------------------------------------------------ two ranks


def over_ranks(kind: str, recipe: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """A rank case: three steps on other tokens than the other rank's: losses, and what delayed scaling keeps."""
    from tests.support.experts import hidden, layer, routing

    model = convert_to_fp8(layer(dtype=torch.float32), recipe)
    if kind == "ddp":
        wrapped: Any = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.experts, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.05)
    losses = []
    for step in range(3):
        seed = 10 * step + dist.get_rank()
        y = wrapped(hidden(seed=seed, dtype=torch.float32), *routing(seed=seed, without=dist.get_rank()))
        loss = y.square().mean()
        loss.backward()
        fp8_step(wrapped)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, fp8_state_dict(wrapped)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_fully_shard_is_ddp_to_the_bit(ranks: RankPool, recipe: str) -> None:
    """An expert that has tokens on one rank alone has its scale on both."""
    pool = ranks(2)
    ddp, sharded = (pool.run(over_ranks, kind, recipe) for kind in ("ddp", "fsdp"))
    for mine, theirs in zip(sharded, ddp, strict=True):
        assert_same_bytes(torch.stack(mine[0]), torch.stack(theirs[0]))
        assert mine[1].keys() == theirs[1].keys() == ddp[0][1].keys()
        for name, value in mine[1].items():
            if name.endswith("weight.amax"):
                assert value.isinf(), "no rank has the whole weight"
            else:
                assert_same_bytes(value, ddp[0][1][name], name)
    if recipe == "delayed":
        assert all(ddp[0][1][f"experts.{e}.down.input.warm"] for e in range(EXPERTS))
