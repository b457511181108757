"""Fp8Parameter: what it holds, what a write does, and what each kind of operation sees."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from megatron_fp8.backends import emulated
from megatron_fp8.params.fp8_parameter import Fp8Parameter, TwoWayFp8Parameter, broadcast, fp8_parameter
from megatron_fp8.quantizer import quantize
from megatron_fp8.recipe import CustomRecipe, Rule
from tests.support.fp8_weights import RECIPES, assert_codes_of, bytes_of, parameter_of, quantizer_of, weight

SHAPES = [(256, 128), (130, 200), (7, 63), (1, 1)]
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def made(recipe: str, shape: tuple[int, int] = (256, 128)) -> Any:
    return parameter_of(RECIPES[recipe], shape)


def assert_holds(parameter: Any, value: torch.Tensor, recipe: str) -> None:
    assert_codes_of(parameter, value, RECIPES[recipe])


@each_recipe
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_scales_and_bytes(recipe: str, shape: tuple[int, int]) -> None:
    parameter = made(recipe, shape)
    assert_holds(parameter, weight(shape), recipe)
    two_way = recipe in ("rowwise", "mxfp8")
    assert type(parameter) is (TwoWayFp8Parameter if two_way else Fp8Parameter)
    assert [(c.dtype, tuple(c.shape)) for c in parameter.codes] == [(torch.uint8, shape)] * (1 + two_way)
    for side in (parameter.quantized.rowwise, parameter.quantized.columnwise):
        assert side.codes.untyped_storage().data_ptr() in {
            c.untyped_storage().data_ptr() for c in parameter.codes
        }


@each_recipe
def test_is_a_bfloat16_parameter_to_torch(recipe: str) -> None:
    original = torch.nn.Parameter(weight(), requires_grad=True)
    original.tensor_model_parallel, original.partition_dim, original.shared = True, 0, True  # type: ignore[attr-defined]
    parameter: Any = fp8_parameter(original, quantizer_of(RECIPES[recipe]))
    assert isinstance(parameter, torch.nn.Parameter) and isinstance(parameter, Fp8Parameter)
    assert parameter.dtype == torch.bfloat16 and parameter.is_leaf and parameter.requires_grad
    assert parameter.type() == "torch.BFloat16Tensor" and parameter.nelement() == 256 * 128
    assert (parameter.tensor_model_parallel, parameter.partition_dim, parameter.shared) == (True, 0, True)
    module = torch.nn.Module()
    module.weight = parameter
    assert dict(module.named_parameters())["weight"] is parameter
    assert module.bfloat16().weight is parameter


def memory_of(parameter: Any) -> list[torch.Tensor]:
    stored = parameter._stored
    return [*stored.codes, *stored.scale_invs, stored.amax, stored.nonfinite]


@each_recipe
def test_a_graph_reads_what_later_writes_leave(recipe: str) -> None:
    """Scales, amax and count stay where they are, and belong to this parameter alone."""
    parameter, other = made(recipe), made(recipe)
    broken = weight(seed=4).index_fill_(0, torch.tensor([3]), torch.inf)
    parameter.data.copy_(broken)  # on CPUs a count is stored only if it is not 0
    parameter.update_in_place()
    addresses = [tensor.data_ptr() for tensor in memory_of(parameter)]
    copied, before = copy.deepcopy(parameter), [bytes_of(tensor) for tensor in memory_of(parameter)]
    other.data.copy_(weight(seed=3))
    for source in (weight(seed=1), other, broken, weight(seed=2)):
        value = weight(seed=3) if source is other else source
        parameter.detach().copy_(source)
        assert_holds(parameter, value, recipe)
        assert parameter.measured.tolist() == [float(value.abs().amax()), int(value.isinf().sum())]
        assert [tensor.data_ptr() for tensor in memory_of(parameter)] == addresses
    for tensor, old in zip(memory_of(copied), before, strict=True):
        assert tensor.data_ptr() not in addresses and bytes_of(tensor) == old


@each_recipe
def test_every_kind_of_write_quantizes(recipe: str) -> None:
    parameter, new = made(recipe), weight(seed=1)
    addresses = [codes.data_ptr() for codes in parameter.codes]
    parameter.data.copy_(new.float())
    assert_holds(parameter, new, recipe)
    parameter.detach().mul_(2)
    assert_holds(parameter, (quantize(new, RECIPES[recipe], "weight").dequantize(torch.bfloat16) * 2), recipe)
    with torch.no_grad():
        torch._foreach_copy_([parameter], [new])
    assert_holds(parameter, new, recipe)
    parameter.data = weight(seed=2)
    assert_holds(parameter, weight(seed=2), recipe)
    parameter.data[3, 5] = 1000.0
    assert float(parameter.dequantize()[3, 5]) == pytest.approx(1000, rel=0.1)
    with torch.no_grad():
        torch.nn.init.zeros_(parameter)
    assert_holds(parameter, torch.zeros(256, 128).bfloat16(), recipe)
    module = torch.nn.Module()
    module.weight = parameter
    module.load_state_dict({"weight": new})
    assert_holds(parameter, new, recipe)
    assert [codes.data_ptr() for codes in parameter.codes] == addresses


def test_a_master_is_rounded_to_bfloat16_first() -> None:
    """1 + 2^-9 lies between two BF16 numbers; in float32 the scale would be another one."""
    master = torch.full((16, 16), 1.0 + 2.0**-9 + 2.0**-10)
    parameter = made("tensorwise", (16, 16))
    parameter.data.copy_(master)
    assert_holds(parameter, master.bfloat16(), "tensorwise")
    unrounded = quantize(master, RECIPES["tensorwise"], "weight").rowwise
    assert unrounded is not None and unrounded.scale_inv != parameter.quantized.rowwise.scale_inv


@each_recipe
def test_other_operations_see_the_value(recipe: str) -> None:
    parameter = made(recipe)
    value = parameter.dequantize()
    assert type(value) is torch.Tensor
    for result, expected in (
        (parameter.clone(), value),
        (parameter + 1, value + 1),
        (parameter.t(), value.t()),
        (parameter.view(-1)[5:9], value.view(-1)[5:9]),
        (parameter.float(), parameter.dequantize(torch.float32)),
        (torch.stack([parameter, parameter])[1], value),
        (parameter.norm(), value.norm()),
    ):
        assert type(result) is torch.Tensor and torch.equal(result, expected)
    assert parameter.expand_as(parameter)._stored is parameter._stored


def test_gradients_flow_to_it() -> None:
    parameter, x = made("blockwise"), torch.randn(4, 128).bfloat16()
    plain = parameter.dequantize().requires_grad_()
    torch.nn.functional.linear(x, parameter).float().square().sum().backward()
    torch.nn.functional.linear(x, plain).float().square().sum().backward()
    assert torch.equal(parameter.grad, plain.grad)


@each_recipe
def test_copies_do_not_share_and_keep_everything(recipe: str) -> None:
    parameter = made(recipe)
    parameter.partition_dim = 1
    copied = copy.deepcopy(parameter)
    assert type(copied) is type(parameter) and copied.requires_grad and copied.partition_dim == 1
    assert torch.equal(copied.get_high_precision_init_val(), weight())
    copied.data.zero_()
    assert_holds(parameter, weight(), recipe)
    with torch.no_grad():
        copied.copy_(parameter)  # codes, not values: a second cast of decoded codes would have another scale
    assert_holds(copied, weight(), recipe)


def test_what_is_pickled_needs_no_class_of_ours() -> None:
    parameter, file = made("mxfp8"), io.BytesIO()
    module = torch.nn.Module()
    module.weight = parameter
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    assert type(loaded) is torch.Tensor and torch.equal(loaded, parameter.dequantize())


@pytest.mark.parametrize("convert", ["float", "half", "double"])
def test_a_change_of_dtype_is_refused(convert: str) -> None:
    module = torch.nn.Module()
    module.weight = made("tensorwise")
    with pytest.raises(TypeError, match=r"cannot become torch\.float.*before its weights are made FP8"):
        getattr(module, convert)()
    assert_holds(module.weight, weight(), "tensorwise")


@each_recipe
def test_moving_keeps_codes(recipe: str) -> None:
    moved = made(recipe).to("meta")
    assert type(moved) is type(made(recipe)) and moved.device.type == "meta"
    assert all(t.device.type == "meta" for t in moved.stored_tensors())


def test_storage_can_be_a_slice_of_a_buffer() -> None:
    parameter = made("blockwise")
    buffer = torch.zeros(256 * 128 + 64, dtype=torch.uint8)
    parameter.replace_storage(buffer[64:].view(256, 128))
    assert_holds(parameter, weight(), "blockwise")
    parameter.data.copy_(weight(seed=1))
    assert_holds(parameter, weight(seed=1), "blockwise")
    assert bytes(buffer[64:].numpy()) == bytes_of(parameter.quantized.rowwise.codes) and not buffer[:64].any()
    with pytest.raises(ValueError, match="cannot live in"):
        parameter.replace_storage(torch.zeros(256, 128))
    with pytest.raises(ValueError, match="travels in BF16"):
        made("mxfp8").replace_storage(buffer[64:].view(256, 128))


@torch.no_grad()
def test_weights_that_are_loaded_before_there_is_a_master_are_its_start() -> None:
    parameter, other = made("tensorwise"), made("tensorwise")
    loaded = weight(seed=5)
    parameter.copy_(loaded)
    assert torch.equal(parameter.get_high_precision_init_val(), loaded)
    other.data = parameter  # codes
    assert torch.equal(other.get_high_precision_init_val(), loaded)
    other.clear_high_precision_init_val()
    parameter.copy_(other)
    assert torch.equal(parameter.get_high_precision_init_val(), other.dequantize())


def test_amax_and_health_count_when_the_weight_is_used() -> None:
    parameter = made("delayed")
    rows = parameter.quantizer.slot.arena.rows
    sick = weight()
    sick[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    parameter.data.copy_(sick)
    assert not rows.any(), "a write is not a use"
    parameter.record()
    assert rows[:, 0].tolist() == [torch.inf, 3.0]


def test_a_warm_delayed_scale_is_used() -> None:
    parameter = made("delayed")
    slot = parameter.quantizer.slot
    parameter.record()
    slot.arena.update(0)
    new = weight(seed=3) * 0.5
    parameter.data.copy_(new)
    expected = (new.float() * slot.scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert bytes_of(parameter.quantized.rowwise.codes) == bytes_of(expected)
    assert parameter.quantized.rowwise.scale_inv == 1 / slot.scale


def test_stochastic_weights_are_refused() -> None:
    rule = Rule(**{**vars(RECIPES["tensorwise"].rule("weight")), "stochastic": True})
    recipe = CustomRecipe(lambda role: rule if role == "weight" else RECIPES["tensorwise"])
    with pytest.raises(ValueError, match="stochastic=False"):
        fp8_parameter(weight(), quantizer_of(recipe))


def test_a_broadcast_of_codes_brings_what_is_known_of_them(ranks: Any) -> None:
    """Products do not look for NaN in codes that are known to be finite: the receiver's own were."""
    first, second = ranks(2).run(_broadcast_nan)
    assert first == second and all(nan for _, nan in first.values())


def _broadcast_nan() -> dict[str, tuple[list[bytes], bool]]:
    """Of each recipe the bytes, and whether a product has NaN in the one column that has to."""
    found = {}
    for recipe in RECIPES:
        value = weight(seed=torch.distributed.get_rank())
        if torch.distributed.get_rank() == 0:
            value[3, 5] = torch.nan
        parameter = fp8_parameter(value, quantizer_of(RECIPES[recipe]))
        parameter.clear_high_precision_init_val()
        broadcast(parameter, 0, None)
        x = quantize(weight(seed=9), RECIPES[recipe], "input").rowwise
        missing = emulated.gemm(x, parameter.quantized.rowwise).isnan()  # type: ignore[arg-type]
        tensors = [bytes_of(tensor) for tensor in (*parameter.stored_tensors(), parameter.cast_amax)]
        found[recipe] = tensors, bool(missing[:, 3].all()) and int(missing.sum()) == len(missing)
    return found


def test_collectives_on_it_are_refused(ranks: Any) -> None:
    ranks(1).run(_broadcast)


def _broadcast() -> None:
    with pytest.raises(RuntimeError, match=r"parameter\.codes"):
        torch.distributed.broadcast(made("tensorwise").data, src=0)
