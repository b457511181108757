"""Megatron-Core's Muon with FP8 parameters: the masters of BF16 weights, one code on all ranks, and resumed bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

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


def resumed(recipe: str, folder: str, layer_wise: bool) -> dict[str, Any]:
    with mock.patch.object(resume, "build_optimizer", build_muon):
        fields = {**NARROW, "fp8_param": True}
        return resume.resumes_exactly(Layout(), recipe, fields, {}, folder, optim={"layer_wise": layer_wise})


@pytest.mark.parametrize("layer_wise", [False, True])
def test_a_checkpoint_resumes(ranks: RankPool, tmp_path: Path, layer_wise: bool) -> None:
    assert ranks(2).run(resumed, "delayed", str(tmp_path), layer_wise) == [{"anew": {}}] * 2


def layer_wise(seed: int, saved: str | None, layer_wise: bool = True) -> resume.Training:
    """A model with Muon, after a step or with a checkpoint."""
    with mock.patch.object(resume, "build_optimizer", build_muon):
        fields, options = {**NARROW, "fp8_param": True}, {"optim": {"layer_wise": layer_wise}}
        made = resume.Training(Layout(), "delayed", fields, {}, seed, **options)
    if saved is None:
        made.steps(1)
    else:
        made.load(Path(saved))
    return made


def saved(folder: str) -> tuple[str, str]:
    with model_parallel(Layout()):
        training = layer_wise(7, None)
        return str(training.save(folder)), training.digests()["weights"]


def loaded(folder: str, apart: bool) -> str:
    with model_parallel(Layout()):
        return layer_wise(8, folder, apart).digests()["weights"]


def test_a_layer_wise_checkpoint_holds_the_masters_of_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Weights too are masters, rounded, and no codes of a rank without them. Other layouts, and plain Muon, load it."""
    (folder, weights), other = ranks(2).run(saved, str(tmp_path))
    assert other == (folder, weights)
    reader = dcp.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    found = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in entries.items()}
    dcp.load(found, storage_reader=reader, no_dist=True)
    start = "optimizer.state.fp32_param."
    masters = {name.removeprefix(start): tensor for name, tensor in found.items() if name.startswith(start)}
    weights_alone = {n for n in found if not n.startswith(("optimizer.", "rng.")) and "fp8_state" not in n}
    assert weights_alone == masters.keys()
    for name, master in masters.items():
        assert torch.equal(found[name], master.to(found[name].dtype)), name
    assert ranks(1).run(loaded, folder, True) == [weights]
    assert ranks(2).run(loaded, folder, False) == [weights] * 2
