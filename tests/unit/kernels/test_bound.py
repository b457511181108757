"""A bound cast starts what the cast starts, with memory that lies and begins alike."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from megatron_fp8.backends.base import Running  # noqa: E402
from megatron_fp8.backends.native import backend as native  # noqa: E402
from megatron_fp8.backends.native.bound import BoundCasts  # noqa: E402
from megatron_fp8.kernels import quantize  # noqa: E402
from megatron_fp8.numerics.rule import Rule  # noqa: E402
from megatron_fp8.quantizer import Quantizer  # noqa: E402
from megatron_fp8.state.arena import Arena  # noqa: E402
from megatron_fp8.tensor import Float8Tensor, QuantizedSide  # noqa: E402
from tests.support.sites import RECIPES  # noqa: E402
from tests.support.triton_stand_in import STREAM, Compiled, StandIn, in_place_of_triton  # noqa: E402

BF16, CPU = torch.bfloat16, torch.device("cpu")
SHAPES = [(128, 256), (70, 150), (256, 640)]


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    for name in ("find_amaxes", "cast_tensor", "cast_rows", "quantize_tiles"):
        interpreted = getattr(quantize, name)
        monkeypatch.setattr(quantize, name, triton.JITFunction(interpreted.fn))
    with in_place_of_triton() as stand_in:
        torch.use_deterministic_algorithms(True)  # memory that is not zeroed begins as NaN
        try:
            yield stand_in
        finally:
            torch.use_deterministic_algorithms(False)


def rule_of(recipe: str, role: str) -> Rule:
    rule = RECIPES[recipe].rule(role)
    assert rule is not None
    return rule


def slot() -> Running:
    rows = torch.zeros(2, 8, dtype=torch.float32)
    return Running(rows[0, 3], rows.view(torch.int32)[0, 3], rows[1, 3])


def named(start: tuple[Any, ...], places: dict[str, torch.Tensor]) -> list[Any]:
    """A start, its pointers as names of what they point to, and the steps from there; 'own' is the cast's own memory."""
    found = []
    for value in start:
        if isinstance(value, int) and value > 1 << 32:
            inside = [
                (name, value - t.untyped_storage().data_ptr())
                for name, t in places.items()
                if 0 <= value - t.untyped_storage().data_ptr() < t.untyped_storage().nbytes()
            ]
            value = inside[0] if inside else "own"
        found.append(value)
    return found


def lies(side: QuantizedSide | None) -> Any:
    if side is None:
        return None
    memory = [
        (t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes())
        for t in (side.codes, side.scale_inv)
    ]
    return memory, side.granularity, side.pow2, side.finite, side.tiled, side.padding


def places(x: torch.Tensor, done: Float8Tensor, stays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {"x": x, **stays}
    for name, side in zip(("row", "column"), done.sides, strict=True):
        if side is not None:
            found |= {f"{name} codes": side.codes, f"{name} scale": side.scale_inv}
    return found


def values_at(pointer: int, count: int) -> list[float]:
    return list((ctypes.c_float * count).from_address(pointer))


@pytest.mark.parametrize("direction", ["rowwise", "both"])
@pytest.mark.parametrize("role", ["input", "weight"])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_it_starts_what_the_cast_starts(recipe: str, role: str, direction: Any, there: StandIn) -> None:
    zeroed: list[bool] = []

    def look(compiled: Compiled, start: tuple[Any, ...]) -> None:
        arguments = dict(zip(compiled.kernel.arg_names, start[2:], strict=True))
        if arguments.get("row_amax") is not None and arguments["col_amax"] is not None:
            behind = arguments["col_amax"] - arguments["row_amax"]
            assert behind == -(-arguments["rows"] // 4) * 16, (
                "columns' amaxes lie behind the rows', on 16 bytes"
            )
        for name, count in (("amax", 1), ("row_amax", arguments["rows"]), ("col_amax", arguments["cols"])):
            if "running" in arguments and arguments[name] is not None:  # find_amaxes, which maxes into them
                zeroed.append(values_at(arguments[name], count) == [0.0] * count)

    there.watch = look
    rule = rule_of(recipe, role)
    scale = torch.ones((), dtype=torch.float32) if rule.delayed else None
    for running in (slot(), None):
        casts = BoundCasts(rule)
        stays = {} if scale is None else {"delayed": scale}
        stays |= {} if running is None else {"slot": running.amax}
        for rows, cols in SHAPES:
            results = []
            for _ in range(4):
                there.order.clear()
                x = torch.randn(rows, cols).to(BF16)
                done = casts(x, direction, scale=scale, running=running, for_product=True)
                starts = [(c, named(start, places(x, done, stays))) for c, start in there.order]
                results.append((starts, [lies(side) for side in done.sides], done.dtype))
            assert any(bound is not None for bound in casts._bound.values()), "nothing was bound"
            assert results[1] == results[2] == results[3] and results[1][0]
            assert done.sides[0] is not None and math.isnan(values_of_memory(done.sides[0].codes))
    assert all(zeroed) and bool(zeroed) == (recipe in ("tensorwise", "rowwise"))


def values_of_memory(codes: torch.Tensor) -> float:
    """The first code; nobody has written it: the mode that fills what is new with NaN is on."""
    return float(codes.flatten()[0].float())


def test_only_what_lies_alike_is_served(there: StandIn) -> None:
    """Strides, alignment and dtypes are bound apart; what memory does not hold goes the general way."""
    casts = BoundCasts(rule_of("tensorwise", "input"))
    wide = torch.randn(128, 192).to(BF16)
    shifted = torch.randn(128 * 128 + 1).to(BF16)[1:].view(128, 128)
    kinds = [torch.randn(128, 128).to(BF16), wide[:, :128], shifted, torch.randn(128, 128)]
    kinds += [torch.randn(128, 128).to(BF16).t(), torch.zeros(0, 128, dtype=BF16)]
    for _ in range(3):
        for x in kinds:
            there.order.clear()
            done = casts(x, "both", scale=None, running=slot(), for_product=True)
            assert done.dtype == x.dtype and done.rowwise is not None and done.rowwise.codes.shape == x.shape
    bound = [entry is not None for entry in casts._bound.values()]
    assert bound == [True, True, True, True, False, False]


def test_the_slot_may_move(there: StandIn) -> None:
    arena = Arena(None, CPU)
    rule = rule_of("blockwise", "input")
    quantizer = Quantizer(rule, arena.add(None, rule.fmt), native)
    x = torch.randn(128, 128).to(BF16)
    for _ in range(2):
        for _ in range(3):
            quantizer(x, "both", record=True)
        compiled, start = there.order[-1]
        arguments = dict(zip(compiled.kernel.arg_names, start[2:], strict=True))
        assert arguments["amax"] == arena.rows.data_ptr()
        for _ in range(100):
            arena.add(None, rule.fmt)


def test_hooks_that_are_added_later_are_called(there: StandIn) -> None:
    """They are to see tensors, so Triton launches by itself; without them the cast is bound as before."""
    casts, x = BoundCasts(rule_of("blockwise", "input")), torch.randn(128, 128).to(BF16)
    cast = partial(casts, x, "both", scale=None, running=slot(), for_product=True)
    for _ in range(3):
        cast()
    (bound,) = casts._bound.values()
    assert bound is not None and bound.cast.ready() == STREAM
    hook = lambda *_, **__: None  # noqa: E731
    made = len(there.made)
    quantize.quantize_tiles.add_pre_run_hook(hook)
    assert bound.cast.ready() is None
    cast()
    assert len(there.made) == made + 1, "Triton's own way"
    quantize.quantize_tiles.pre_run_hooks.remove(hook)
    cast()
    assert len(there.made) == made + 1 and bound.cast.ready() == STREAM


def test_another_current_device_is_not_launched_on(there: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)
    casts, x = BoundCasts(rule_of("blockwise", "input")), torch.randn(128, 128).to(BF16)
    for _ in range(3):
        casts(x, "both", scale=None, running=slot(), for_product=True)
    (bound,) = casts._bound.values()
    assert bound is not None and bound.cast.ready() == STREAM
    there.active.get_current_device = lambda: 1
    assert bound.cast.ready() is None
