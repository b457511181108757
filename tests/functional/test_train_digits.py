"""examples/train_digits.py reaches the accuracy that it states, in BF16 and in FP8."""

from __future__ import annotations

import re

from tests.support.command import ROOT, run

EXAMPLE = ROOT / "examples" / "train_digits.py"


def test_digits_reach_the_stated_accuracy() -> None:
    done = run(EXAMPLE, timeout=200)
    assert done.returncode == 0, done.stderr
    found = {name: float(value) for name, value in re.findall(r"^(\w+) +([\d.]+)% of 360", done.stdout, re.M)}
    stated = {
        name: float(value) for name, value in re.findall(r"^    (\w+) +([\d.]+)%$", EXAMPLE.read_text(), re.M)
    }
    assert list(found) == list(stated) == ["bf16", "tensorwise", "delayed", "mxfp8"]
    for name, accuracy in found.items():
        assert accuracy >= 97 and abs(accuracy - stated[name]) < 1.2, (name, accuracy, stated[name])
    assert done.stdout.count("2 of 3 modules with parameters run in FP8") == 3
