"""Fp4Parameter: a weight that lives as NVFP4 codes, two a byte, for both directions."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from megatron_fp8.params.fp8_parameter import Fp4Parameter
from megatron_fp8.params.frozen_parameter import frozen_parameter
from megatron_fp8.recipe import NVFP4BlockScaling
from megatron_fp8.telemetry.high_precision_tensors import weight_values
from tests.support.fp8_weights import assert_codes_of, bytes_of, parameter_of, weight

RECIPES = {"2d": NVFP4BlockScaling(), "1d": NVFP4BlockScaling(disable_2d_quantization=True)}
SHAPES = [(256, 128), (130, 200), (7, 63), (1, 1)]
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def made(recipe: str, shape: tuple[int, int] = (256, 128)) -> Any:
    return parameter_of(RECIPES[recipe], shape)


def assert_holds(parameter: Any, value: torch.Tensor, recipe: str) -> None:
    assert_codes_of(parameter, value, RECIPES[recipe])


@each_recipe
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_scales(recipe: str, shape: tuple[int, int]) -> None:
    parameter = made(recipe, shape)
    assert type(parameter) is Fp4Parameter and parameter.shape == shape and parameter.dtype == torch.bfloat16
    assert_holds(parameter, weight(shape), recipe)


def test_bytes() -> None:
    """Half a byte a value and direction; a scale of a 16x16 block and direction; the tensor's amax."""
    stored = sum(t.numel() * t.element_size() for t in made("2d").stored_tensors())
    assert stored == 2 * (256 * 128 // 2 + 256 * 128 // 256) + 4


@each_recipe
def test_writes_copies_and_pickles(recipe: str) -> None:
    parameter, new = made(recipe), weight(seed=1)
    addresses = [codes.data_ptr() for codes in parameter.codes]
    parameter.data.copy_(new.float())
    assert_holds(parameter, new, recipe)
    assert [codes.data_ptr() for codes in parameter.codes] == addresses
    copied = copy.deepcopy(parameter)
    parameter.data.copy_(weight(seed=2))
    assert type(copied) is Fp4Parameter
    assert_holds(copied, new, recipe)
    copied.data.copy_(parameter.data)  # codes, not a second cast
    assert_holds(copied, weight(seed=2), recipe)
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), parameter.dequantize())


def test_inf_is_counted_and_saturates() -> None:
    parameter, bad = made("2d"), weight()
    bad[3, 5] = torch.inf
    parameter.data.copy_(bad)
    assert_holds(parameter, bad, "2d")
    assert parameter.measured[1] == 1 and parameter.dequantize().isfinite().all()


@each_recipe
def test_inference_keeps_the_rowwise_codes(recipe: str) -> None:
    parameter = made(recipe)
    row = parameter.quantized.rowwise
    kept = frozen_parameter(parameter, parameter.quantizer)
    assert bytes_of(kept.quantized.rowwise.codes) == bytes_of(row.codes) and kept.quantized.columnwise is None
    assert kept.shape == parameter.shape and torch.equal(kept.dequantize(), parameter.dequantize())


def test_telemetry_reads_values_of_a_piece_and_codes_of_a_whole() -> None:
    parameter = made("2d")
    whole = weight_values(parameter, columnwise=True)
    assert whole.codes is parameter.quantized and torch.equal(whole.values, weight())
    parameter.own_piece(100, 300)
    parameter.main_param = weight().float().view(-1)[100:300]
    piece = weight_values(parameter, columnwise=True)
    assert piece.codes is None and torch.equal(piece.values, weight().view(1, -1)[:, 100:300])


def test_it_has_no_single_byte_buffer() -> None:
    with pytest.raises(ValueError, match="travels in BF16"):
        made("2d").replace_storage(torch.empty(256 * 128, dtype=torch.uint8))
