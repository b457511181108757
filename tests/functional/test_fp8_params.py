"""Training with fp8_param: losses, gradient norms and masters of casting BF16 weights every iteration, bit for bit."""

from __future__ import annotations

import math

import pytest

from tests.fp8_gpt import RECIPES
from tests.fp8_params import param_training
from tests.ranks import Layout, RankPool


def same(ranks: RankPool, world: int, layout: Layout, recipe: str, **options) -> None:
    plain = param_training(ranks, world, layout, recipe, fp8_param=False, **options)
    param = param_training(ranks, world, layout, recipe, fp8_param=True, **options)
    for before, after in zip(plain, param, strict=True):
        assert before.fp8_weights == [] and after.fp8_weights
        assert repr(after.losses) == repr(before.losses)
        # An Inf under MX's largest scale is decoded beyond bfloat16: that loss is NaN, with FP8 parameters or without.
        assert recipe == "mxfp8" or all(map(math.isfinite, after.losses))
        assert after.norms == before.norms
        assert after.stepped == before.stepped
        assert after.masters == before.masters
        assert after.evaluated == before.evaluated
        assert after.nonfinite == before.nonfinite


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_rank(ranks: RankPool, recipe: str) -> None:
    same(ranks, 1, Layout(), recipe, sick=(1,), steps=4)
