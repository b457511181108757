"""examples/train_digits.py reaches the accuracy that it states, in BF16 and in FP8."""

from __future__ import annotations

import re

import pytest

from tests.support.command import ROOT, run

EXAMPLE = ROOT / "examples" / "train_digits.py"


RECIPES = ("bf16", "tensorwise", "delayed", "mxfp8")


@pytest.mark.parametrize("recipes", [("delayed",), pytest.param(RECIPES, marks=pytest.mark.long)])
def test_digits_reach_the_stated_accuracy(recipes: tuple[str, ...]) -> None:
    done = run(EXAMPLE, *(f"--recipe={recipe}" for recipe in recipes), timeout=200)
    assert done.returncode == 0, done.stderr
    found = {name: float(value) for name, value in re.findall(r"^(\w+) +([\d.]+)% of 360", done.stdout, re.M)}
    stated = {
        name: float(value) for name, value in re.findall(r"^    (\w+) +([\d.]+)%$", EXAMPLE.read_text(), re.M)
    }
    assert (tuple(found), tuple(stated)) == (recipes, RECIPES)
    for name, accuracy in found.items():
        assert accuracy >= 97 and abs(accuracy - stated[name]) < 1.2, (name, accuracy, stated[name])
    assert done.stdout.count("2 of 3 modules with parameters run in FP8") == len({*recipes} - {"bf16"})
