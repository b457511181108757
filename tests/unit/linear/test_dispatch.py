"""Where kernels run, an iteration's end and the cast of masters go through them: the same bits, and nobody waits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks import gpu_fused
from benchmarks.gpu_common import Machine, NotRun
from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from benchmarks.support.launched_kernels import launched, unchecked
from megatron_fp8 import kernels
from megatron_fp8.backends import BACKENDS
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.params.fp8_parameter import fp8_parameter
from megatron_fp8.params.shards import quantize_shards
from megatron_fp8.quantizer import Quantizer
from megatron_fp8.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from megatron_fp8.state.arena import Arena
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.matrices import DEVICE, mixed

HOST = torch.device("cpu")
kernels_run = mock.patch.object(kernels, "run_on", return_value=True)


def nobody_waits() -> Any:
    """Reading a tensor's value on the host is an error."""
    names = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "nonzero")
    return mock.patch.multiple(
        torch.Tensor,
        **{name: mock.Mock(side_effect=AssertionError(f"{name}: the host waits")) for name in names},
    )


# ---------------------------------------------------------------------------------------------- the delayed update


def arenas(recipe: DelayedScaling, slots: int) -> list[Arena]:
    """Two alike: one whose tensors are where kernels run, one on the host."""
    made = [Arena(None, device) for device in (DEVICE, HOST)]
    for arena in made:
        for i in range(slots):
            arena.add(recipe, (E4M3, E5M2)[i % 2])
    return made


@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(),
        DelayedScaling(amax_history_len=5, amax_compute_algo="max", margin=1, amax_epsilon=1e-3),
        DelayedScaling(amax_history_len=3, interval=2),
    ],
    ids=["default", "max-margin", "interval"],
)
def test_the_update_is_one_launch_a_format(recipe):
    """Scales, histories and who is warm: what a checkpoint keeps, after finite, missing and infinite amaxes."""
    slots = 20
    mine, theirs = arenas(recipe, slots)
    generator = torch.Generator().manual_seed(0)
    for iteration in range(7):
        running = torch.rand(slots, generator=generator) * 10.0 ** (iteration - 3)
        if iteration > 2:  # by then all have a scale
            running[torch.rand(slots, generator=generator) < 0.3] = 0
            running[iteration] = float("inf")
        for arena in (mine, theirs):
            arena.rows[0, :slots] = running.to(arena.device)
        warm = all(slot.warm for slot in mine.slots)
        with kernels_run, launched() as calls, nobody_waits() if warm else nullcontext():
            mine.update(iteration)
        assert calls == {"_update": 2}, calls
        with mock.patch.object(kernels, "run_on", return_value=False), launched() as calls:
            theirs.update(iteration)
        assert not calls
        assert_same_bytes(mine.scale, theirs.scale, f"scales of iteration {iteration}")
        for slot, other in zip(mine.slots, theirs.slots, strict=True):
            assert slot.warm == other.warm
            saved, wanted = mine.saved_slot(slot), theirs.saved_slot(other)
            for name, value in saved.items():
                assert_same_bytes(value, wanted[name], f"{name} of slot {slot.index}, iteration {iteration}")
    assert warm, "the last updates were watched for waiting"


# ------------------------------------------------------------------------------------------------ parameters' cast

RECIPES: dict[str, Any] = {
    "delayed": DelayedScaling(),
    "tensorwise": Float8CurrentScaling(margin=1),
    "blockwise": Float8BlockScaling(),
    "blockwise-fp32": Float8BlockScaling(use_f32_scales=True),
}
SHAPES = [(130, 200), (3, 5)]


def parameter(recipe: Any, shape: tuple[int, int], backend: str, device: torch.device) -> Any:
    state = Fp8State(device)
    rule = recipe.rule("weight")
    slot = state.arena(None).add(recipe if isinstance(recipe, DelayedScaling) else None, rule.fmt)
    value = torch.nn.Parameter(mixed(shape, torch.bfloat16).to(device))
    made = fp8_parameter(value, Quantizer(rule, slot, BACKENDS[backend]))
    made.record()
    slot.arena.update(0)  # delayed: from here on there is a scale
    return made


def assert_same_parameter(found: Any, wanted: Any, what: str) -> None:
    assert_all_same_bytes(found.stored_tensors(), wanted.stored_tensors(), what)
    assert_same_bytes(found.cast_amax, wanted.cast_amax, f"{what}: amax")
    for each in (found, wanted):
        each.record()
    mine, theirs = (each.quantizer.slot.arena for each in (found, wanted))
    assert_same_bytes(mine.rows[:, :1], theirs.rows[:, :1], f"{what}: what is recorded")
    assert mine.counter.current.casts == theirs.counter.current.casts, what


@pytest.mark.parametrize(
    ("recipe", "special"), [*((recipe, False) for recipe in RECIPES), ("delayed", True), ("blockwise", True)]
)
def test_masters_are_cast_by_kernels(recipe, special):
    """By copy_, as an optimizer without shards does it, and in shards cut anywhere; the host never asks."""
    for shape in SHAPES:
        with kernels_run, launched() as calls:
            mine = parameter(RECIPES[recipe], shape, "native", DEVICE)
        assert calls["_piece_amax"] == calls["_piece_cast"] == 1 and "cast_tensor" not in calls, calls
        theirs = parameter(RECIPES[recipe], shape, "emulated", HOST)
        assert_same_parameter(mine, theirs, f"{recipe} {shape}, made")
        master = mixed(shape, torch.float32, special, seed=5)
        with kernels_run, nobody_waits(), launched() as calls:
            mine.data.copy_(master)
        assert calls == {"_piece_amax": 1, "_piece_cast": 1}, calls
        theirs.data.copy_(master.cpu())
        assert_same_parameter(mine, theirs, f"{recipe} {shape}, copied")

        cut = master.numel() // 3
        flat = mixed(shape, torch.float32, special, seed=6).flatten()
        for piece, offset in ((flat[:cut], 0), (flat[cut:], cut)):
            with kernels_run, nobody_waits(), launched() as calls:
                quantize_shards([mine], [piece], [offset], None)
            assert calls == {"_piece_amax": 1, "_piece_cast": 1}, calls
            quantize_shards([theirs], [piece.cpu()], [offset], None)
            assert_same_parameter(mine, theirs, f"{recipe} {shape}, from {offset}")
        with kernels_run, launched() as calls:
            quantize_shards([mine], [None], [None], None)
        assert not calls, "a rank without a piece launches nothing"
        quantize_shards([theirs], [None], [None], None)
        assert_same_parameter(mine, theirs, f"{recipe} {shape}, no piece")


def test_weights_with_two_sets_of_codes_are_quantized_whole():
    recipe = MXFP8BlockScaling()
    with kernels_run, launched() as calls:
        mine = parameter(recipe, (40, 96), "native", DEVICE)
    assert calls == {"quantize_tiles": 1}, calls
    assert_same_parameter(mine, parameter(recipe, (40, 96), "emulated", HOST), "mxfp8")


# ------------------------------------------------------------------------------------------------- the GPU's checks


def test_the_gpu_checks_run_here():
    """What `make gpu-check` runs on a GPU, over interpreted kernels; torch's operations in their place fail it."""
    machine = Machine(DEVICE, dry=True, deadline=60)
    with kernels_run, unchecked(), np.errstate(all="ignore"):
        assert "all bits equal" in gpu_fused.update(machine, DelayedScaling(amax_history_len=4), slots=5)
        with launched() as calls:
            gpu_fused.small(machine)
    kinds = {"norm", "swiglu", "swiglu_grad"}
    expected = {
        f"{kernel} of {kind}"
        for kernel in ("find_amaxes", "cast_tensor", "cast_rows", "quantize_tiles", "write_values")
        for kind in kinds
    } - {"find_amaxes of swiglu_grad"} | {"find_gradient_amaxes"}  # of both halves in one pass
    assert expected <= set(calls), "the sanitiser sees all of them"
    assert {"_row_rstd", "_update", "_piece_amax", "_piece_cast"} <= set(calls)
    with mock.patch.object(kernels, "run_on", return_value=False), pytest.raises(AssertionError):
        gpu_fused.update(machine, DelayedScaling(amax_history_len=4), slots=5)
    for check in gpu_fused.checks().values():
        with pytest.raises(NotRun, match="needs a GPU"):
            check(Machine(HOST, dry=True, deadline=60))


def test_where_kernels_run():
    gpu = torch.device("cuda", 0)
    with mock.patch.object(kernels, "refusal", return_value=None):
        assert kernels.run_on(gpu) and not kernels.run_on(HOST)
        with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
            assert not kernels.run_on(gpu), "traced code is compiled by the tracer"
    with mock.patch.object(kernels, "refusal", return_value="no C compiler"):
        assert not kernels.run_on(gpu)
