"""docs/performance.md's modelled speed-ups of a linear, computed again from its bytes a value and devices' peaks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_fp8.estimate.device import device

PAGE = (Path(__file__).parents[3] / "docs" / "performance.md").read_text()
M, K, N = 8192, 4096, 14336
RECIPES = "delayed", "tensorwise", "rowwise", "blockwise", "nvfp4"
ROWS = [
    row.strip("| ").split(" | ")
    for row in PAGE.splitlines()
    if row.count(" | ") == 6 and row.strip("| ").startswith(RECIPES)
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_modelled_speed_up(row: list[str]) -> None:
    recipe, _, text, *_, of_h100, of_b200 = row
    share = re.search(r"1/(\d+) of scales", text)
    scales = 2 / int(share[1]) if share else 0.0
    for name, found in (("h100", of_h100), ("b200", of_b200)):
        gpu = device(name)
        own = re.search(rf"{name.upper()}: (\d)", text)
        moved = float(own[1] if own else text[0]) + scales
        peak = gpu.fp4 if recipe == "nvfp4" and name == "b200" else gpu.fp8
        if found == "-":
            assert gpu.fp4 is None
            continue
        assert peak is not None
        products, values = 6 * M * K * N, M * K + N * K + M * N
        fp8 = products / (0.62 * peak) + values * moved / (0.85 * gpu.bandwidth)
        assert found == f"{products / (0.70 * gpu.bf16) / fp8:.2f}"


def test_every_recipe_is_there() -> None:
    assert tuple(row[0].partition(",")[0] for row in ROWS) == RECIPES
