"""FP8 parameters and Megatron-Core: what users set wrongly is said, and what goes wrong without a word does not."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.fp8_gpt import DISTRIBUTED, NARROW, OPTIONS, fp8_config, watched_collectives
from benchmarks.support.gpt import build_chunks, build_optimizer, gpt_config, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.mcore import params
from megatron_fp8.mcore.params import fp8_params, make_fp8_params
from megatron_fp8.mcore.report import site_report
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
from tests.support.fp8_params import OVERLAP, param_training, whole_masters
from tests.support.long_cases import some

SHARED = {**OVERLAP, "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}


def built(
    recipe: str, *, ddp: dict[str, Any] | None = None, optim: dict[str, Any] | None = None, **fields: Any
) -> Any:
    """(config, chunks, optimizer) of the small GPT with FP8 parameters."""
    config = fp8_config(Layout(), recipe, **{"fp8_param": True, **fields})
    chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=128, ddp=ddp)
    return config, chunks, build_optimizer(config, chunks, ddp=ddp, optim=optim)


# ---------------------------------------------------------------------------------------------------------- bad input

WRONG: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "ddp alone": (
        "delayed", {"fp8_param": False}, {"fp8_param_gather": True}, {}, "set fp8_param=True there",
    ),
    "shared by codes": (
        "blockwise", {}, {**DISTRIBUTED, "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True},
        {}, "weights that are sent as codes",
    ),
    "shared by a mixture": (
        "mxfp8", {"fp8_overrides": {"*.linear_fc2": "tensorwise"}},
        {**DISTRIBUTED, "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}, {},
        "linear_fc2.*weights that are sent as codes",
    ),
    "shared without a gather": (
        "mxfp8", {}, {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}, {},
        "use_distributed_optimizer=True",
    ),
    "optimizer does not know": ("mxfp8", {}, SHARED, {}, "Give both the same value"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_contradict_each_other(ranks: RankPool, name: str) -> None:
    ranks(1).run(_wrong, *WRONG[name])


def _wrong(
    recipe: str, fields: dict[str, Any], ddp: dict[str, Any], optim: dict[str, Any], message: str
) -> None:
    with model_parallel(), pytest.raises(ValueError, match=message):
        built(recipe, ddp=ddp, optim=optim, **fields)


def test_weights_that_were_never_made_fp8(ranks: RankPool) -> None:
    ranks(1).run(_never_made)


def _never_made() -> None:
    from megatron.core.models.gpt import GPTModel

    with model_parallel():
        config = fp8_config(Layout(), "tensorwise", fp8_param=True)
        model = GPTModel(config, get_gpt_layer_fp8_spec(config), vocab_size=128, max_sequence_length=128)
        with pytest.raises(ValueError, match=r"is torch\.float32"):
            make_fp8_params([model.float()])
        model.bfloat16()
        with pytest.raises(RuntimeError, match="make_fp8_params"):
            model.set_is_first_microbatch()
        assert len(make_fp8_params([model])) == 8
        model.set_is_first_microbatch()
        assert make_fp8_params([model]) == []


def test_a_plain_megatron_config_is_enough(ranks: RankPool) -> None:
    ranks(1).run(_plain_config)


def _plain_config() -> None:
    """Megatron's own TransformerConfig, whose checks want Transformer Engine, so fp8 is set after it was made."""
    with model_parallel():
        config = gpt_config(Layout())
        config.fp8, config.fp8_recipe, config.fp8_param = "hybrid", "tensorwise", True
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=128, ddp=DISTRIBUTED)
        assert chunks[0].ddp_config.fp8_param_gather and len(fp8_params(chunks[0])) == 8
        assert (
            chunks[0].buffers[0].param_dtype == torch.bfloat16
            or chunks[0].buffers[1].param_dtype == torch.bfloat16
        )
        optimizer = build_optimizer(config, chunks, ddp=DISTRIBUTED)
        losses = [train_step(config, chunks, optimizer, step, **OPTIONS)[0] for step in range(2)]
        assert losses[1] < losses[0]


MEMORY: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "codes": ("blockwise", DISTRIBUTED, None),
    "two-way": ("mxfp8", {}, "slightly more than BF16"),
    "shared": ("rowwise", SHARED, "slightly more than BF16"),
    "unshared": ("rowwise", DISTRIBUTED, "saves nothing here"),
}


@pytest.mark.parametrize("name", MEMORY)
def test_a_warning_where_memory_is_above_bf16(ranks: RankPool, name: str) -> None:
    ranks(1).run(_memory, *MEMORY[name])


def _memory(recipe: str, ddp: dict[str, Any], message: str | None) -> None:
    shared = {"reuse_grad_buf_for_mxfp8_param_ag": "reuse_grad_buf_for_mxfp8_param_ag" in ddp}
    said: list[str] = []
    with model_parallel(), mock.patch.object(params, "print_rank_0", lambda text, **_: said.append(text)):
        _, chunks, _ = built(recipe, ddp=ddp, optim=shared)
        counted = params.parameter_bytes(chunks)
        saves_nothing = message is not None and "nothing" in message
        assert counted["weights"] == (0 if saves_nothing else 8)
        notes = {note for site in site_report(chunks, gather=False) for note in site["notes"]}
        assert any("stays BF16" in note for note in notes) == saves_nothing
    if message is None:
        assert said == [] and counted["warning"] is None
    else:
        assert len(said) == 1 and message in said[0] and message in counted["warning"]


# ------------------------------------------------------------------------------------------------------- what is sent


def test_amaxes_of_all_shards_take_one_collective(ranks: RankPool) -> None:
    """Beside the iteration's own, whatever the number of layers; and what is gathered are bytes."""
    for layers in (2, 4):
        weights = 4 * layers
        for maxima, dtypes in ranks(2).run(_collectives, layers):
            # Three roles a site, amax and health, and whether somebody has more; a shard's amax and its health.
            assert maxima == [2 * 3 * weights + 2, 2 * weights]
            assert sorted(dtypes, key=str) == [torch.bfloat16, torch.uint8]


def _collectives(layers: int) -> tuple[list[int], list[torch.dtype]]:
    from megatron.core.distributed import param_and_grad_buffer as buffers

    with model_parallel():
        config, chunks, optimizer = built("tensorwise", ddp=DISTRIBUTED, num_layers=layers)
        train_step(config, chunks, optimizer, 0, **OPTIONS)
        dtypes, gather = [], buffers.dist_all_gather_func

        def counted(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            dtypes.append(output.dtype)
            return gather(output, *args, **kwargs)

        buffers.dist_all_gather_func = counted
        try:
            with watched_collectives("all_reduce") as calls:
                train_step(config, chunks, optimizer, 1, **OPTIONS)
        finally:
            buffers.dist_all_gather_func = gather
    # The cross entropy's maximum over the vocabulary is a matrix.
    return [t.numel() for _, t, operator in calls if operator == dist.ReduceOp.MAX and t.ndim == 1], dtypes


def test_broadcast_params_gives_every_rank_the_first_ones_weights(ranks: RankPool) -> None:
    first, second = ranks(2).run(_broadcast_params)
    assert first == second


def _broadcast_params() -> list[bytes]:
    """Ranks that start from other weights; after broadcast_params codes, scales and masters are rank 0's."""
    with model_parallel():
        config = fp8_config(Layout(), "blockwise", fp8_param=True)
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=128, seed=dist.get_rank())
        optimizer = build_optimizer(config, chunks)
        tensors = [t for p in fp8_params(chunks[0]) for t in p.stored_tensors()]
        tensors += [p.detach() for group in optimizer.param_groups for p in group["params"]]
        return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]


def test_shared_buffer_finds_parameters_of_any_size(ranks: RankPool) -> None:
    """Sizes that are no multiple of 64, between which Megatron pads: each arrives as it was sent."""
    odd = {"hidden_size": 132, "num_attention_heads": 2, "num_query_groups": 2, "ffn_hidden_size": 259}
    plain = param_training(ranks, 2, Layout(), "mxfp8", fp8_param=False, fields=odd, ddp=DISTRIBUTED, steps=2)
    param = param_training(ranks, 2, Layout(), "mxfp8", fp8_param=True, fields=odd, ddp=DISTRIBUTED, steps=2)
    assert param[0].losses == plain[0].losses and whole_masters(param) == whole_masters(plain)


def test_a_forced_gather_delivers(ranks: RankPool) -> None:
    """What saving and loading do under overlap: masters to weights at once, without a forward pass."""
    for recipe in ("mxfp8", "delayed"):
        assert ranks(2).run(_forced, recipe) == [True, True]


def _forced(recipe: str) -> bool:
    shared = {"reuse_grad_buf_for_mxfp8_param_ag": True} if recipe == "mxfp8" else {}
    with model_parallel():
        ddp = {**OVERLAP, "fp8_param_gather": True, **shared}
        config, chunks, optimizer = built(recipe, ddp=ddp, optim=shared)
        train_step(config, chunks, optimizer, 0, **OPTIONS)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for master in group["params"]:
                    master.fill_(0.01)
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            one._copy_main_params_to_model_params()
        chunks[0].start_param_sync(force_sync=True)
        return all(bool(((p.dequantize() - 0.01).abs() < 0.001).all()) for p in fp8_params(chunks[0]))


# --------------------------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("recipe", some(["delayed", "rowwise"], "delayed"))
def test_data_parallel_layouts_agree_within_what_bf16_shows(ranks: RankPool, recipe: str) -> None:
    """One rank and four over the same tokens, which differ in the order of float32 sums of gradients.

    Unclipped: clipping multiplies every gradient by a norm whose last bits depend on that order.
    """

    def apart(recipe: str | None) -> float:
        options: dict[str, Any] = {"fields": NARROW, "ddp": DISTRIBUTED, "batch": 8, "clip": 1e6}
        one, four = (
            param_training(ranks, n, Layout(), recipe, fp8_param=recipe is not None, **options)[0].losses
            for n in (1, 4)
        )
        return max(abs(a - b) for a, b in zip(one, four, strict=True))

    # On processors without BF16 instructions BF16's losses are the same: a few last places of a loss of 6 are allowed.
    assert apart(recipe) <= max(apart(None), 16 * 2.0**-21)
