"""copy_model: the same logits, and from then on two models that know nothing of each other."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8 import TransformerConfig
from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.mcore.iteration import iteration_counts
from megatron_fp8.mcore.model_copies import copy_model
from megatron_fp8.mcore.params import make_fp8_params
from megatron_fp8.mcore.report import site_report
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
from megatron_fp8.params.fp8_parameter import Fp8Parameter
from tests.support.long_cases import some

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
    "dispatch": (Layout(), {**BLOCKS, **EXPERTS, "moe_fp8_dispatch": True}),
    "tp2": (Layout(tp=2), DELAYED),
    "pp2-interleaved": (Layout(pp=2, vpp=2), {**DELAYED, "num_layers": 4, "fp8_param": True}),
    "ep2": (Layout(ep=2), {**DELAYED, **EXPERTS}),
}


def built(layout: Layout, fields: dict[str, Any]) -> list[Any]:
    """This rank's chunks of a model that has not run, in Float16Module."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    config = TransformerConfig(**{**FIELDS, **fields, **layout.config_fields()})
    chunks = []
    for stage in range(layout.vpp or 1):
        where = {"ignore_virtual": False, "vp_stage": stage if layout.vpp else None}
        whole = GPTModel(
            config,
            get_gpt_layer_fp8_spec(config),
            vocab_size=128,
            max_sequence_length=32,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            vp_stage=where["vp_stage"],
        )
        chunks.append(Float16Module(config, whole))
    if fields.get("fp8_param"):
        make_fp8_params(chunks)
    return chunks


def losses(chunks: list[Any], seed: int, *, forward_only: bool = True) -> list[float]:
    """Of two microbatches, by the layout's schedule; on the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def batches() -> Iterator[torch.Tensor]:
        draw = torch.Generator().manual_seed(seed)
        return (torch.randint(128, (2, 33), generator=draw) for _ in range(2))

    def forward(data: Iterator[torch.Tensor], model: Any) -> Any:
        ids, positions = next(data), torch.arange(32).expand(2, 32).contiguous()
        found = model(ids[:, :-1].contiguous(), positions, None, labels=ids[:, 1:].contiguous())
        return found, lambda y: (y.float().mean(), {"loss": y.float().mean().detach()})

    with torch.set_grad_enabled(not forward_only):
        made = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[batches() for _ in chunks] if len(chunks) > 1 else batches(),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=2,
            seq_length=32,
            micro_batch_size=2,
            forward_only=forward_only,
        )
    return [one["loss"].item() for one in made]


def trained(chunks: list[Any], seed: int) -> Any:
    """(losses, the norm of each gradient) of an iteration without a step, which is in FP8 where the config says so."""
    for param in parameters(chunks):
        param.grad = None
    found = losses(chunks, seed, forward_only=False)
    config = chunks[0].config
    assert bool(iteration_counts(config)["fp8_gemms"]) == bool(config.fp8)
    return found, [None if p.grad is None else float(p.grad.float().norm()) for p in parameters(chunks)]


def parameters(chunks: list[Any]) -> list[torch.nn.Parameter]:
    return [param for chunk in chunks for param in chunk.parameters()]


def copied(layout: Layout, fields: dict[str, Any]) -> dict[str, Any]:
    """A case for ranks."""

    def a_copy(chunks: list[Any]) -> list[Any]:
        return copy_model(chunks) if layout.vpp else [copy_model(chunks[0])]

    with model_parallel(layout):
        model = built(layout, fields)
        for seed in (1, 2):
            trained(model, seed)
        other = a_copy(model)
        flags = [[vars(p).get("tensor_model_parallel") for p in parameters(each)] for each in (model, other)]
        names = [[site["name"] for site in site_report(each)] for each in (model, other)]
        grads = [None if p.grad is None else p.grad.clone() for p in parameters(model)]
        same = [losses(model, 3), losses(other, 3)]
        # Something else is done with the copy: the model's next iteration is the one that a further copy has.
        third = a_copy(other)
        with torch.no_grad():
            for param in parameters(other):
                param.mul_(0.5)
        apart, _ = trained(other, 4)
        untouched = all(
            (p.grad is None) if g is None else torch.equal(p.grad, g)
            for p, g in zip(parameters(model), grads, strict=True)
        )
        nexts = [trained(each, 5) for each in (model, third)]
        return {
            "flags": flags,
            "names": names,
            "same": same,
            "apart": apart,
            "untouched": untouched,
            "next": nexts,
        }


@pytest.mark.parametrize("case", some(CASES, *(case for case in CASES if case not in ("bf16", "fp8_param"))))
def test_a_copy_is_the_model_and_goes_its_own_way(ranks: RankPool, case: str) -> None:
    layout, fields = CASES[case]
    results = ranks(max(layout.tp * layout.pp, layout.ep)).run(copied, layout, fields)
    assert any(found["same"][0] for found in results)
    for found in results:
        assert found["flags"][0] == found["flags"][1]
        assert found["names"][0] == found["names"][1]
        first, second = found["same"]
        assert first == second and (not first or found["apart"] != first)
        assert found["untouched"] and found["next"][0] == found["next"][1], found


def written(fp8_param: bool) -> list[tuple[str, float, float]]:
    """A rank case: a prepared model's first FP8 weight, and its copy's, are written anew.

    Returns (whose, factor, the largest magnitude there over that which was written).
    """
    with model_parallel(Layout()):
        chunks = built(Layout(), {**DELAYED, "fp8_param": fp8_param})
        trained(chunks, 1)
        model = prepare_for_inference(chunks[0])
        found = []
        for whose, one in (("copy", copy_model(model)), ("original", model)):
            weight = next(p for p in one.parameters() if isinstance(p, Fp8Parameter))
            value = weight.dequantize().clone()
            for factor in (1.0, 1.8, 20.0):
                weight.copy_(value * factor)
                share = weight.dequantize().abs().max() / (value.abs().max() * factor)
                found.append((whose, factor, float(share)))
    return found


@pytest.mark.parametrize("fp8_param", [False, True])
def test_what_is_written_into_a_prepared_model_or_its_copy_is_not_saturated(
    ranks: RankPool, fp8_param: bool
) -> None:
    for whose, factor, share in ranks(1).run(written, fp8_param)[0]:
        assert share == pytest.approx(1, abs=0.04), (whose, factor)


def refused() -> tuple[str, ...]:
    """A case for ranks: what copy.deepcopy says of a model, and copy_model of a chunk of two and of one in
    DistributedDataParallel."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    with model_parallel(Layout()):
        (model,) = built(Layout(), {})
        with pytest.raises(TypeError) as plain:
            copy.deepcopy(model)
        interleaved = mock.patch.object(model.config, "virtual_pipeline_model_parallel_size", 2)
        with interleaved, pytest.raises(ValueError) as half:
            copy_model(model)
        wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        with pytest.raises(ValueError) as told:
            copy_model(wrapped)
        return str(plain.value), str(told.value), str(half.value)


def test_what_cannot_be_copied(ranks: RankPool) -> None:
    plain, told, half = ranks(1).run(refused)[0]
    assert "ProcessGroup" in plain, (
        "Megatron-Core's models can be copied now: docs/megatron.md says they cannot"
    )
    assert "DistributedDataParallel" in told and "load its state_dict" in told
    assert "1 of 2 chunks" in half and "the list of all" in half
