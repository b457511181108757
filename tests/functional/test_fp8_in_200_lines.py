"""examples/fp8_in_200_lines.py trains, has the package's bytes, and is as short as its name says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

FILE = Path(__file__).parents[2] / "examples" / "fp8_in_200_lines.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fp8_in_200_lines", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_bytes_are_the_packages(example: ModuleType) -> None:
    assert len(FILE.read_text().splitlines()) <= 200
    torch.manual_seed(0)
    assert example.check() == "114,348 bytes are megatron_fp8's"


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_it_learns_what_float32_learns(example: ModuleType, recipe: str) -> None:
    found = example.train(recipe, 30)
    assert found == pytest.approx(example.train(None, 30), rel=0.05) and found < 0.15, "it was 0.4"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, scale, fmt: (x.float() * scale).to(torch.bfloat16).clamp(-448, 448).to(fmt),
        lambda x, scale, fmt: (x.float() / (1 / scale)).clamp(-448, 448).to(fmt),
    ],
    ids=["a product in BF16", "E4M3's largest value for E5M2"],
)
def test_a_wrong_cast_is_found(example: ModuleType, wrong: object) -> None:
    example.cast = wrong
    with pytest.raises(AssertionError):
        example.check()
