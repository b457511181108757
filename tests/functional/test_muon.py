"""Megatron-Core's Muon with FP8 parameters: the masters of BF16 weights, one code on all ranks, and resumed bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.fp8_gpt import CLIP, NARROW
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from tests.support import fp8_params, resume
from tests.support.muon import build_muon


def trained(recipe: str, fp8_param: bool, layer_wise: bool) -> tuple[fp8_params.Trained, bool]:
    """A rank case: three steps, of which one is skipped; and whether all ranks have the first rank's codes at the end."""
    kept: list[Any] = []

    def build(config: Any, chunks: list[Any], **options: Any) -> Any:
        kept.extend(chunks)
        return build_muon(config, chunks, optim={"layer_wise": layer_wise})

    with mock.patch.object(fp8_params, "build_optimizer", build):
        seen = fp8_params.train_params(Layout(), recipe, fp8_param, NARROW, {}, 3, (1,), True, 8, CLIP)
    weights = [p for chunk in kept for p in chunk.parameters()]
    mine = torch.cat(
        [c.flatten() for p in weights if hasattr(p, "codes") for c in p.codes] or [torch.zeros(1)]
    )
    first = mine.clone()
    dist.broadcast(first, 0)
    return seen, torch.equal(first, mine)


@pytest.mark.parametrize(
    "recipe, layer_wise", [("delayed", False), ("delayed", True), ("mxfp8", True), ("nvfp4", True)]
)
def test_two_ranks_train_as_with_bf16_weights(ranks: RankPool, recipe: str, layer_wise: bool) -> None:
    plain, param = (ranks(2).run(trained, recipe, fp8_param, layer_wise) for fp8_param in (False, True))
    for (one, _), (other, same_codes) in zip(plain, param, strict=True):
        assert same_codes and bool(other.fp8_weights) and not one.fp8_weights
        assert one.stepped == other.stepped == [True, False, True]
        assert repr((one.losses, one.norms, one.evaluated)) == repr(
            (other.losses, other.norms, other.evaluated)
        )
        assert one.masters == other.masters and one.masters
    both = {key for seen, _ in param for key in seen.masters}
    assert (len(param[0][0].masters) < len(both)) == layer_wise


def resumed(recipe: str, folder: str) -> dict[str, Any]:
    with mock.patch.object(resume, "build_optimizer", build_muon):
        fields = {**NARROW, "fp8_param": True}
        return resume.resumes_exactly(Layout(), recipe, fields, {}, folder)


def test_a_checkpoint_resumes(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(resumed, "delayed", str(tmp_path)) == [{"anew": {}}] * 2


def layer_wise_save() -> str:
    from megatron_fp8.mcore import checkpoint

    with mock.patch.object(resume, "build_optimizer", build_muon), model_parallel(Layout()):
        training = resume.Training(Layout(), "delayed", NARROW, {}, 7, optim={"layer_wise": True})
        with pytest.raises(ValueError) as refused:
            checkpoint.sharded_state(training.chunks, training.optimizer)
        return str(refused.value)


def test_a_layer_wise_optimizer_is_not_stored_as_replicas(ranks: RankPool) -> None:
    assert all("layer_wise_distributed_optimizer=False" in said for said in ranks(2).run(layer_wise_save))
