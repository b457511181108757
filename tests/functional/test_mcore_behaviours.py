"""Megatron-Core with and without install(): with fp8 off the same bits, with fp8 on FP8, or one line saying why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.support.gpt import gpt_config
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from tests.support.long_cases import some
from tests.support.mcore_behaviours import BEHAVIOURS, EXPERTS, SEQUENCE, SMALL, VOCAB, run

FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
# What Megatron-Core cannot do on a CPU without Transformer Engine; only packed sequences need FP8's (or our) spec.
BEYOND_PLAIN = {
    "experts": "sequence parallel not supported by torch LayerNorm",
    "experts-with-bias": "is a view and is being modified inplace",
    "fused-softmax": "No module named 'scaled_masked_softmax_cuda'",
    "fused-rope": "apply_rope_fusion is not available",
    "clip": "LayerNorm.__init__() got an unexpected keyword argument 'config'",
    "packed": "Packed sequence is not supported by DotProductAttention",
}
REFUSED_IN_FP8 = {
    "heterogeneous-linear": "config.fp8_overrides = {'decoder.layers.1.mlp': 'bf16'}",
    "llava-vision-alone": "and not for the model that has it, whose config ends the iterations",
}


LONG = ("gpt-layernorm", "expert-layers")


TRAINED = [name for name in BEHAVIOURS if name != "mamba"]


@pytest.mark.parametrize("name", some(TRAINED, *(name for name in TRAINED if name not in LONG)))
def test_behaviour(ranks: RankPool, name: str) -> None:
    rank = ranks(BEHAVIOURS[name][1].model_ranks)
    plain, installed, fp8 = (rank.run(run, name, *how)[0] for how in ((True, {}), (False, {}), (False, FP8)))
    if name in BEYOND_PLAIN:
        assert BEYOND_PLAIN[name] in plain["error"]
        # Packed sequences need this package's attention, which is FP8's.
        assert installed == plain if name == "packed" else "error" not in installed, installed
    else:
        assert "error" not in plain and installed == plain
    assert installed.get("same", True) and not installed.get("missing")
    if name in REFUSED_IN_FP8:
        assert REFUSED_IN_FP8[name] in fp8["error"]
        return
    assert "error" not in fp8, fp8
    assert fp8.get("fp8_gemms", 1) > 0 and fp8.get("same", True)
    assert fp8.get("keys") == installed.get("keys")
    assert "digest" not in fp8 or fp8["digest"] != installed.get("digest")
    if "losses" in installed:
        assert fp8["losses"] == pytest.approx(installed["losses"], rel=5e-3)


@pytest.mark.parametrize("fp8", [{}, FP8], ids=["bf16", "fp8"])
def test_mamba_hybrids_are_refused_with_the_reason(ranks: RankPool, fp8: dict[str, Any]) -> None:
    """In any precision: Megatron-Core names classes that only Transformer Engine has, and fails with StopIteration."""
    found = ranks(1).run(run, "mamba", False, fp8)[0]["error"]
    assert "MambaModel needs Transformer Engine, which is not installed" in found


def refusals() -> dict[str, str]:
    """A rank case: what is refused when a spec or a model is made -> the error."""
    from megatron.core.models.gpt import GPTModel

    from megatron_fp8 import TransformerConfig
    from megatron_fp8.mcore.sites import prepare
    from megatron_fp8.mcore.spec import (
        get_gpt_decoder_block_fp8_spec,
        get_gpt_layer_fp8_spec,
        get_gpt_mtp_block_fp8_spec,
    )

    def config(**fields: Any) -> Any:
        return gpt_config(cls=TransformerConfig, **{**SMALL, **FP8, **fields})

    def without_mtp() -> None:
        made = config(mtp_num_layers=1)
        model = GPTModel(made, get_gpt_layer_fp8_spec(made), VOCAB, SEQUENCE, position_embedding_type="rope")
        prepare([model])

    def frequency(spec: Any, value: Any) -> Any:
        return spec(config(**EXPERTS, moe_layer_freq=value))

    found = {}
    with model_parallel():
        for name, make in {
            "one layer's spec": lambda: frequency(get_gpt_layer_fp8_spec, [0, 1]),
            "a short list": lambda: frequency(get_gpt_decoder_block_fp8_spec, [0, 1, 1]),
            "grouped": lambda: get_gpt_layer_fp8_spec(
                config(**EXPERTS, moe_grouped_gemm=True, add_bias_linear=True)
            ),
            "activation": lambda: get_gpt_layer_fp8_spec(
                config(
                    **EXPERTS,
                    moe_grouped_gemm=True,
                    recompute_granularity="selective",
                    recompute_modules=["moe_act"],
                )
            ),
            "latent": lambda: get_gpt_layer_fp8_spec(config(**EXPERTS, moe_latent_size=64)),
            "mtp": without_mtp,
        }.items():
            try:
                make()
            except ValueError as error:
                found[name] = str(error)
        block = frequency(get_gpt_decoder_block_fp8_spec, [0, 1])
        found["kinds"] = [layer.submodules.mlp.module.__name__ for layer in block.layer_specs]  # type: ignore[assignment]
        assert get_gpt_mtp_block_fp8_spec(config(), block) is None
        assert config(fp8=False).fp8 is None
    return found


def test_specs_are_refused_in_one_line(ranks: RankPool) -> None:
    found = ranks(1).run(refusals)[0]
    assert found.pop("kinds") == ["MLP", "MoELayer"]
    wanted = {
        "one layer's spec": "get_gpt_decoder_block_fp8_spec",
        "a short list": "moe_layer_freq=[0, 1, 1]",
        "grouped": "moe_grouped_gemm=True",
        "activation": "'moe_act'",
        "latent": "moe_latent_size=64",
        "mtp": "get_gpt_mtp_block_fp8_spec",
    }
    assert set(found) == set(wanted) and all(wanted[name] in found[name] for name in wanted), found


def loop_of_ones_own(ends: bool) -> tuple[str, list[bool]]:
    """A rank case: delayed scaling without Megatron-Core's schedules; the error, and which scales moved."""
    from megatron.core.models.gpt import GPTModel

    from megatron_fp8 import TransformerConfig
    from megatron_fp8.mcore.iteration import finish_iteration
    from megatron_fp8.mcore.runtime import state_of
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
    from tests.support.mcore_behaviours import _gpt_loss

    with model_parallel(Layout()):
        config = gpt_config(cls=TransformerConfig, **SMALL, fp8="hybrid", fp8_format="delayed")
        spec = get_gpt_layer_fp8_spec(config)
        model = GPTModel(config, spec, VOCAB, SEQUENCE, position_embedding_type="rope").bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        error = ""
        try:
            for _ in range(2):
                for _ in range(2):  # microbatches
                    _gpt_loss(model).backward()
                if ends:
                    finish_iteration([model])
                optimizer.step()
        except RuntimeError as raised:
            error = str(raised)
        slots = list(state_of(config).slots())
        assert len({slot.name for slot in slots}) == len(slots) == 2 * 4 * 3, (
            "sites got their names before they ran"
        )
        model.eval()
        _gpt_loss(model)  # evaluation is no iteration
        return error, [float(slot.scale) != 1 for slot in slots]


def test_a_loop_that_never_ends_its_iterations_is_told(ranks: RankPool) -> None:
    error, moved = ranks(1).run(loop_of_ones_own, False)[0]
    assert "megatron_fp8.mcore.iteration.finish_iteration([model])" in error and not any(moved)
    error, moved = ranks(1).run(loop_of_ones_own, True)[0]
    assert not error and all(moved)
