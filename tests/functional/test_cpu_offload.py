"""optimizer_cpu_offload with FP8 parameters: the same bits, and checkpoints that resume. Streams are simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.fp8_gpt import CLIP, DISTRIBUTED, NARROW
from benchmarks.support.ranks import Layout, RankPool
from tests.support.fp8_params import OVERLAP, Trained, train_params, whole_masters
from tests.support.hybrid_optimizer import offloading
from tests.support.resume import resumes_exactly


def trained(recipe: str, fp8_param: bool, ddp: dict[str, Any], offload: dict[str, Any] | None) -> Trained:
    """A rank case: three steps, the second of which is skipped, and validations."""
    from contextlib import nullcontext

    with nullcontext({}) if offload is None else offloading(**offload) as optim:
        return train_params(Layout(), recipe, fp8_param, NARROW, ddp, 3, (1,), True, 8, CLIP, optim=optim)


def assert_same(some: list[Trained], others: list[Trained]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.stepped == other.stepped == [True, False, True]
        assert repr((one.losses, one.norms, one.evaluated)) == repr(
            (other.losses, other.norms, other.evaluated)
        )
    weights, wanted = whole_masters(some), whole_masters(others)
    assert weights.keys() == wanted.keys() and [key for key in weights if weights[key] != wanted[key]] == []


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "nvfp4"])
def test_two_ranks_train_as_without_fp8_parameters_and_as_without_offloading(
    ranks: RankPool, recipe: str
) -> None:
    """The CPU's Adam; and, with an Adam whose bits are those of the other device, a run without offloading."""
    ddp = OVERLAP if recipe == "delayed" else DISTRIBUTED
    found = [
        ranks(2).run(trained, recipe, fp8_param, ddp, offload)
        for fp8_param, offload in (
            (True, {}),
            (False, {}),
            (True, {"same_adam": True, "fraction": 0.5, "overlap": True}),
            (True, None),
        )
    ]
    assert [bool(of_rank.fp8_weights) for seen in found for of_rank in seen] == [True] * 2 + [False] * 2 + [
        True
    ] * 4
    assert_same(found[0], found[1])
    assert_same(found[2], found[3])


def resumed(recipe: str, fields: dict[str, Any], folder: str, offload: dict[str, Any]) -> dict[str, Any]:
    with offloading(**offload) as optim:
        return resumes_exactly(Layout(), recipe, fields, DISTRIBUTED, folder, back=True, optim=optim)


@pytest.mark.parametrize(
    "recipe, offload", [("delayed", {}), ("mxfp8", {"same_adam": True, "fraction": 0.5, "overlap": True})]
)
def test_a_checkpoint_resumes(ranks: RankPool, recipe: str, offload: dict[str, Any], tmp_path: Path) -> None:
    """Also where the CPU's masters have gone on since, and have to go back."""
    fields = {**NARROW, "fp8_param": True}
    for differences in ranks(2).run(resumed, recipe, fields, str(tmp_path), offload):
        assert differences == {"anew": {}, "back": {}}
