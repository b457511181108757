"""What layers, the iteration's end and the optimizer hand to fused kernels: that they do, the bits, and the time.

The checks are gpu_check.py's (``--only fused,update,masters``), the section gpu_bench.py's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks import gpu_contenders as contenders
from benchmarks.gpu_common import Machine, NotRun, graphed, no_synchronisation, supported
from benchmarks.gpu_kernels import Bench, random
from benchmarks.gpu_models import TINY, Gpt, Training
from benchmarks.support.compare import assert_same_bytes
from benchmarks.support.launched_kernels import launched
from megatron_fp8 import recipe
from megatron_fp8.backends import BACKENDS
from megatron_fp8.backends.native import backend as native
from megatron_fp8.kernels.lazy_tensor import LazyTensor, materialize
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.params.fp8_parameter import fp8_parameter
from megatron_fp8.params.shards import quantize_shards
from megatron_fp8.quantizer import Quantizer
from megatron_fp8.state.arena import Arena
from megatron_fp8.state.fp8_state import Fp8State
from megatron_fp8.train.launch.parallel import set_deterministic

HOST = torch.device("cpu")


def checks() -> dict[str, Callable[[Machine], str]]:
    """Every check by name; of the recipes that the device supports."""
    found: dict[str, Callable[[Machine], str]] = {
        "update": lambda machine: update(machine, on_gpu(machine, "delayed"))
    }
    for name in ("delayed", "tensorwise", "blockwise"):
        found[f"masters {name}"] = lambda machine, name=name: masters(machine, on_gpu(machine, name))  # type: ignore[misc]
    for name in ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"):

        def check(machine: Machine, name: str = name) -> str:
            if not machine.dry:
                set_deterministic()  # before the first product, when cuBLAS reads its setting
            on_gpu(machine, name)
            return f"{layers(name)}; with experts {layers(name, replace(TINY, experts=4))}"

        found[f"fused {name}"] = check
    return found


def on_gpu(machine: Machine, name: str) -> Any:
    """The recipe; NotRun without a GPU that does it."""
    if machine.dry:
        raise NotRun("needs a GPU")
    return supported(machine, name)


def layers(name: str, sizes: Gpt = TINY, steps: int = 3) -> str:
    """A GPT whose norms and SwiGLU its linears' kernels compute, and one where they are written first: the same bits."""
    outcomes = []
    for first in (False, True):
        with (
            launched() as calls,
            mock.patch.object(native, "source_of", materialize) if first else nullcontext(),
        ):
            run = Training(sizes, name, "native")
            losses = torch.stack([run.step() for _ in range(steps)])
        outcomes.append((losses, dict(run.model.named_parameters()), calls))
    (losses, parameters, calls), (others, their, written_calls) = outcomes
    computed = Counter({k.partition(" of ")[2]: n for k, n in calls.items() if " of " in k})
    assert set(computed) == {"norm", "swiglu", "swiglu_grad"}, f"launched: {dict(calls)}"
    assert not [k for k in calls if k.startswith("write_values")], "nothing is written between"
    each = steps * sizes.layers
    found = {k: n for k, n in written_calls.items() if " of " in k}
    norms = 1 if sizes.experts else 2  # what a router reads too is written by the norm
    wanted = {f"write_values of {k}": each * (norms if k == "norm" else 1) for k in computed}
    assert found == wanted, f"written first: {found}"
    assert_same_bytes(losses, others, "losses")
    for key, value in parameters.items():
        assert_same_bytes(value, their[key], key)
    return f"{each} layers, {computed.total()} launches compute what they quantize; all bits equal"


def update(machine: Machine, chosen: recipe.DelayedScaling, slots: int = 900) -> str:
    """The delayed update against the host's torch operations, and nobody waits once every slot has a scale."""
    mine, theirs = (Arena(None, device) for device in (machine.device, HOST))
    for arena in (mine, theirs):
        for i in range(slots):
            arena.add(chosen, (E4M3, E5M2)[i % 2])
    generator = torch.Generator().manual_seed(0)
    for iteration in range(20):
        amax = torch.rand(slots, generator=generator) * 2.0 ** (iteration - 10)
        amax[torch.rand(slots, generator=generator) < 0.1] = 0 if iteration else 1
        for arena in (mine, theirs):
            arena.rows[0, :slots] = amax.to(arena.device)
        with launched() as calls, no_synchronisation(machine) if iteration > 1 else nullcontext():
            mine.update(iteration)
        theirs.update(iteration)
        assert calls == {"_update": 2}, calls
        assert_same_bytes(mine.scale, theirs.scale, f"scales of iteration {iteration}")
    for slot, other in zip(mine.slots, theirs.slots, strict=True):
        for key, value in mine.saved_slot(slot).items():
            assert_same_bytes(value, theirs.saved_slot(other)[key], f"{key} of slot {slot.index}")
    return f"{slots} slots, 20 iterations, two launches each: all bits equal, no synchronisation"


def masters(machine: Machine, chosen: Any, shape: tuple[int, int] = (1000, 520)) -> str:
    """FP8 parameters cast from float32 masters, whole and in pieces, against the host's; nobody waits."""
    count, pairs, cut = 0, [], shape[0] * shape[1] // 7
    for name, device in (("native", machine.device), ("emulated", HOST)):
        rule, state = chosen.rule("weight"), Fp8State(device)
        slot = state.arena(None).add(chosen if rule.delayed else None, rule.fmt)
        start = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
        pairs.append(fp8_parameter(torch.nn.Parameter(start), Quantizer(rule, slot, BACKENDS[name])))
    for step in range(3):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(2 + step)) * 4.0**step
        here = whole.to(machine.device)
        for parameter in pairs:
            parameter.record()
            parameter.quantizer.slot.arena.update(step)
        for piece in (None, slice(0, 1), slice(1, cut), slice(cut, shape[0] * shape[1])):
            with launched() as calls, no_synchronisation(machine):
                _cast(pairs[0], here, piece)
            _cast(pairs[1], whole, piece)
            assert calls == {"_piece_amax": 1, "_piece_cast": 1}, calls
            for mine, theirs in zip(*(p.stored_tensors() for p in pairs), strict=True):
                assert_same_bytes(mine, theirs, f"step {step}, {piece}")
                count += mine.numel()
            assert_same_bytes(pairs[0].cast_amax, pairs[1].cast_amax, f"step {step}, {piece}: amax")
    return f"{count:,} codes and scales, all equal, no synchronisation"


def _cast(parameter: Any, master: torch.Tensor, piece: slice | None) -> None:
    if piece is None:
        parameter.data.copy_(master)
    else:
        quantize_shards([parameter], [master.view(-1)[piece]], [piece.start], None)


def small(machine: Machine) -> None:
    """What runs under the sanitiser: each kernel once, on small odd matrices."""
    for what, rows, cols in (("norm", 70, 200), ("swiglu", 70, 200), ("swiglu_grad", 70, 202)):
        source = sources(machine, what, rows, cols)
        for chosen in contenders.RECIPES.values():
            _quantize(source, chosen.rule("input"), None, False)
        _quantize(
            source, recipe.DelayedScaling().rule("input"), torch.full((), 3.0, device=machine.device), True
        )
    update(machine, recipe.DelayedScaling(amax_history_len=4), slots=21)
    masters(machine, recipe.Float8BlockScaling(), shape=(130, 140))


# -------------------------------------------------------------------------------------------------------- the section


def fused(bench: Bench) -> None:
    """Norm and SwiGLU with the quantization of their result, computed by one kernel, and written first."""
    machine = bench.machine
    for what, rows, cols in (("norm", 8192, 4096), ("swiglu", 8192, 14336), ("swiglu_grad", 8192, 28672)):
        case = f"{what} {rows} x {cols}"
        if machine.dry:
            bench.skip("fused", case, "computed", "kernels run on a GPU only")
            continue
        source = sources(machine, what, rows, cols)
        runs: dict[str, Callable[[], Any]] = {}
        for name, chosen in contenders.RECIPES.items():
            rule = chosen.rule("grad_output" if what == "swiglu_grad" else "input")
            scale = torch.full((), 3.0, device=machine.device) if name == "delayed" else None
            for first in (True, False):
                run = partial(_quantize, source, rule, scale, first)
                runs[f"{name} {'written' if first else 'computed'}"] = graphed(machine, run)
        times = bench.time("fused", case, runs, baseline=())
        more: dict[str, dict[str, str]] = {label: {} for label in times}
        for name in contenders.RECIPES:
            faster = times[f"{name} written"].median / times[f"{name} computed"].median
            more[f"{name} computed"] = {"rate": f"{faster:.2f} x as fast as written first"}
        bench.tell_more(more)
        machine.empty()


def _quantize(source: Callable[[], Any], rule: Any, scale: torch.Tensor | None, first: bool) -> Any:
    made = source()
    x = LazyTensor(made, (made.rows, made.cols))
    return native.quantize(x.materialize() if first else x, rule, "both", scale=scale)


def sources(machine: Machine, what: str, rows: int, cols: int) -> Callable[[], Any]:
    """What makes a TileSource [rows, cols] anew: the norm's statistic is part of the work."""
    from megatron_fp8.kernels.fused_quantize import RmsNorm, Swiglu, SwigluGradient, row_rstd

    if what == "norm":
        x, weight = random(machine, rows, cols, seed=1), random(machine, 1, cols, seed=2)[0]
        return lambda: RmsNorm(x, row_rstd(x, 1e-5), weight)
    if what == "swiglu":
        return partial(Swiglu, random(machine, rows, 2 * cols, seed=1))
    return partial(
        SwigluGradient, random(machine, rows, cols // 2, seed=1), random(machine, rows, cols, seed=2)
    )
