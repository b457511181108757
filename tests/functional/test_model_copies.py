"""copy_model: the same logits, and from then on two models that know nothing of each other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from benchmarks.support.ranks import Layout, RankPool, model_parallel

FIELDS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "bf16": True, "params_dtype": torch.bfloat16,
    "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
EXPERTS = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
DELAYED = {"fp8": "hybrid", "fp8_format": "delayed"}
BLOCKS = {"fp8": "e4m3", "fp8_format": "blockwise"}
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "bf16": (Layout(), {}),
    "delayed": (Layout(), DELAYED),
    "fp8_param": (Layout(), {**DELAYED, "fp8_param": True}),
    "experts": (Layout(), {**DELAYED, **EXPERTS}),
    "dispatch": (Layout(), {**BLOCKS, **EXPERTS, "moe_fp8_dispatch": True}),
    "tp2": (Layout(tp=2), DELAYED),
}


def built(layout: Layout, fields: dict[str, Any]) -> Any:
    """A model that has not run, in Float16Module."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    from megatron_fp8 import TransformerConfig
    from megatron_fp8.mcore.params import make_fp8_params
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    config = TransformerConfig(**{**FIELDS, **fields, **layout.config_fields()})
    whole = GPTModel(config, get_gpt_layer_fp8_spec(config), vocab_size=128, max_sequence_length=32)
    model = Float16Module(config, whole)
    if fields.get("fp8_param"):
        make_fp8_params([model])
    return model


def loss(model: Any, seed: int) -> torch.Tensor:
    ids = torch.randint(128, (2, 33), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(32).expand(2, 32).contiguous()
    found: torch.Tensor = model(ids[:, :-1].contiguous(), positions, None, labels=ids[:, 1:].contiguous())
    return found.mean()


def trained(model: Any, seed: int) -> Any:
    """(loss, the norm of each gradient) of an iteration without a step, which is in FP8 where the config says so."""
    from megatron_fp8.mcore.iteration import finish_iteration

    model.zero_grad()
    found = loss(model, seed)
    found.backward()
    assert bool(finish_iteration([model]).fp8_gemms) == bool(model.config.fp8)
    return found.item(), [float(p.grad.float().norm()) for p in model.parameters()]


def copied(layout: Layout, fields: dict[str, Any]) -> dict[str, Any]:
    """A case for ranks."""
    from megatron_fp8.mcore.copies import copy_model
    from megatron_fp8.mcore.report import site_report

    with model_parallel(layout):
        model = built(layout, fields)
        for seed in (1, 2):
            trained(model, seed)
        other = copy_model(model)
        flags = [[vars(p).get("tensor_model_parallel") for p in each.parameters()] for each in (model, other)]
        names = [[site["name"] for site in site_report([each])] for each in (model, other)]
        grads = [p.grad.clone() for p in model.parameters()]
        with torch.no_grad():
            same = [loss(model, 3).item(), loss(other, 3).item()]
        # Something else is done with the copy: the model's next iteration is the one that a further copy has.
        third = copy_model(other)
        with torch.no_grad():
            for param in other.parameters():
                param.mul_(0.5)
        apart, _ = trained(other, 4)
        untouched = all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
        nexts = [trained(each, 5) for each in (model, third)]
        return {
            "flags": flags,
            "names": names,
            "same": same,
            "apart": apart,
            "untouched": untouched,
            "next": nexts,
        }


@pytest.mark.parametrize("case", CASES)
def test_a_copy_is_the_model_and_goes_its_own_way(ranks: RankPool, case: str) -> None:
    layout, fields = CASES[case]
    for found in ranks(layout.tp).run(copied, layout, fields):
        assert found["flags"][0] == found["flags"][1]
        assert found["names"][0] == found["names"][1]
        first, second = found["same"]
        assert first == second and found["apart"] != first
        assert found["untouched"] and found["next"][0] == found["next"][1], found


def refused() -> tuple[str, str]:
    """A case for ranks: what copy.deepcopy says of a model, and copy_model of one in DistributedDataParallel."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_fp8.mcore.copies import copy_model

    with model_parallel(Layout()):
        model = built(Layout(), {})
        with pytest.raises(TypeError) as plain:
            copy.deepcopy(model)
        wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        with pytest.raises(ValueError) as told:
            copy_model(wrapped)
        return str(plain.value), str(told.value)


def test_what_cannot_be_copied(ranks: RankPool) -> None:
    plain, told = ranks(1).run(refused)[0]
    assert "ProcessGroup" in plain, (
        "Megatron-Core's models can be copied now: docs/megatron.md says they cannot"
    )
    assert "DistributedDataParallel" in told and "load its state_dict" in told
