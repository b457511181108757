"""Rank cases: the small GPT diagnosed in a layout, with one product of one site made wrong or not."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.support.fp8_gpt import fp8_config
from benchmarks.support.gpt import _sample, bf16_spec, build_chunks
from benchmarks.support.ranks import Layout, model_parallel
from tests.support.model_faults import make_wrong

SEQUENCE, VOCAB = 64, 128
SMALL: dict[str, Any] = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4}


class Sequences:
    """A data set as training reads it: the same sample under a number in every layout."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = _sample(3, index, SEQUENCE, VOCAB)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(SEQUENCE, dtype=torch.float32),
            "position_ids": torch.arange(SEQUENCE, dtype=torch.int64),
        }


def diagnosed(
    layout: Layout,
    recipe: str,
    fields: dict[str, Any] | None = None,
    wrong: tuple[str, str, float] | None = None,
    budget: int = 160,
) -> dict[str, Any]:
    """The diagnosis of an untrained model as plain values, its worst site in parts; ``wrong``: (site, GEMM, factor)."""
    from megatron_fp8.diagnosis.attribution import Limits
    from megatron_fp8.diagnosis.checkpoint_runner import CheckpointRunner
    from megatron_fp8.diagnosis.diagnosis import diagnose_runner
    from megatron_fp8.mcore.sites import check_plan, state_of
    from megatron_fp8.train.config.run_config import RunConfig

    with model_parallel(layout):
        config = fp8_config(layout, recipe, **{**SMALL, **(fields or {})})
        chunks = build_chunks(config, spec=_spec, sequence=SEQUENCE, vocab=VOCAB)
        check_plan(chunks)
        run = RunConfig()
        run.train.global_batch_size, run.train.seq_length = 2, SEQUENCE
        # A pass is one microbatch where it can be: its cost does not grow with the sequences in it.
        alone = layout.pp == 1 and dist.get_world_size() == layout.model_ranks
        run.train.micro_batch_size = 2 if alone else 1
        runner = CheckpointRunner(run, chunks, Sequences(), 0, 4, loss_scale=1.0)
        if wrong is not None and wrong[0] in runner.sites:
            make_wrong(runner.sites[wrong[0]], *wrong[1:])
        rows = [arena.rows.clone() for arena in state_of(config).arenas]
        buffers = {
            name: buffer.clone() for name, buffer in chunks[0].named_buffers() if "expert_bias" in name
        }
        queued = len(torch.cuda._queued_calls)
        again = AssertionError("every rank has looked at this plan already")
        with runner.unrecorded(), mock.patch("megatron_fp8.mcore.iteration.check_plan", side_effect=again):
            found = diagnose_runner(runner, 0.9, budget, None, Limits(refined=1), lambda _: None)
        assert len(torch.cuda._queued_calls) == queued, "each pass leaves calls for a GPU that may yet come"
        arenas = state_of(config).arenas
        same = all(torch.equal(a, b.rows[:, : a.shape[1]]) for a, b in zip(rows, arenas, strict=True))
        assert same and state_of(config).iteration == 0, "a diagnosis left amaxes or ended an iteration"
        assert bool(buffers) == bool(config.moe_router_enable_expert_bias)
        for name, buffer in chunks[0].named_buffers():
            assert name not in buffers or torch.equal(buffer, buffers[name]), (
                "a diagnosis moved experts' biases"
            )
        return found.as_dict()


def planned(
    layout: Layout, formats: tuple[str, ...], loss_budget: float, fields: dict[str, Any], sensitive: str
) -> dict[str, Any]:
    """The plan by GEMM of an untrained model, one layer of which no format with blocks can hold.

    One channel of the input of that layer's attention is 2^20 times the others, its weights as much smaller: in BF16
    it is the same model.
    """
    from megatron_fp8.diagnosis.checkpoint_runner import CheckpointRunner
    from megatron_fp8.diagnosis.format_costs import measure_formats
    from megatron_fp8.mcore.names import named_parameters
    from megatron_fp8.mcore.sites import check_plan, state_of, unwrap
    from megatron_fp8.train.config.run_config import RunConfig

    with model_parallel(layout):
        config = fp8_config(layout, "mxfp8", **{**SMALL, **fields})
        chunks = build_chunks(config, spec=_spec, sequence=SEQUENCE, vocab=VOCAB)
        check_plan(chunks)
        for chunk in chunks:
            named = dict(named_parameters(unwrap(chunk)))
            if (norm := named.get(f"{sensitive}.input_layernorm.weight")) is not None:
                with torch.no_grad():
                    norm[5] *= 2.0**20
                    named[f"{sensitive}.self_attention.linear_qkv.weight"][:, 5] /= 2.0**20
        run = RunConfig()
        run.train.global_batch_size, run.train.seq_length, run.train.micro_batch_size = 2, SEQUENCE, 1
        runner = CheckpointRunner(run, chunks, Sequences(), 0, 4, loss_scale=1.0)
        slots = [len(arena.slots) for arena in state_of(config).arenas]
        with runner.unrecorded():
            found = measure_formats(runner, formats, loss_budget, 1000)
        assert [len(arena.slots) for arena in state_of(config).arenas] == slots, "an experiment left slots"
        return found.as_dict()


def _spec(config: Any) -> Any:
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    return get_gpt_layer_fp8_spec(config) if config.fp8 else bf16_spec(config)
