"""Delayed scaling beside a model's state_dict: with it another model goes on to the same bits, without it not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from benchmarks.support.compare import assert_all_same_bytes
from benchmarks.support.fp8_gpt import OPTIONS, fp8_config
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel

TP = Layout(tp=2)


def handed_on() -> Any:
    """A rank case: a model after two iterations, one that took over all of it, and one that took the weights alone."""
    from megatron_fp8.mcore.checkpoint.state_dict import fp8_state_dict, load_fp8_state_dict
    from megatron_fp8.mcore.runtime import unwrap
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    delayed = {"fp8_amax_history_len": 3, "fp8_amax_compute_algo": "max"}

    def model(seed: int, recipe: str = "delayed", **fields: Any) -> tuple[Any, Any, Any]:
        config = fp8_config(TP, recipe, **fields)
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=128, seed=seed)
        optimizer = build_optimizer(config, chunks)
        optimizer.step = lambda: (True, 0.0, None)
        return config, chunks, optimizer

    with model_parallel(TP):
        first, second, cold = (model(seed, **delayed) for seed in (1, 2, 3))
        for iteration in (0, 1):
            train_step(*first, iteration, **OPTIONS)
        weights, saved = copy.deepcopy(unwrap(first[1][0]).state_dict()), fp8_state_dict(first[1])
        for _, chunks, _ in (second, cold):
            unwrap(chunks[0]).load_state_dict(weights)
        load_fp8_state_dict(second[1], saved)
        losses = [train_step(*each, 2, **OPTIONS)[0] for each in (first, second, cold)]
        other = model(4, "tensorwise")
        with pytest.raises(ValueError) as refused:
            load_fp8_state_dict(other[1], saved)
        return saved, losses, [fp8_state_dict(each[1]) for each in (first, second, cold)], str(refused.value)


def test_another_model_goes_on_to_the_same_bits(ranks: RankPool) -> None:
    for saved, losses, states, refused in ranks(2).run(handed_on):
        assert saved["iteration"] == 2 and "decoder.layers.1.mlp.linear_fc2.grad_output.amax_history" in saved
        assert all(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in saved.values())
        assert losses[0] == losses[1] != losses[2]
        assert_all_same_bytes(states[1], states[0])
        assert any(not torch.equal(states[2][name], tensor) for name, tensor in states[0].items())
        assert "Build the model as the saved one was, in the same layout" in refused
