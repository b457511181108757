"""Who runs in the GPU benchmark: BF16, this package by recipe, torchao and Transformer Engine where they are installed.

All wrap the same weights; what is not here is named with the reason.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_common import Machine
from benchmarks.gpu_models import Fp8BenchLinear, Layer, Sizes, plain_linear
from megatron_fp8 import recipe
from megatron_fp8.backends import transformer_engine as engine
from megatron_fp8.state.fp8_state import Fp8State

RECIPES: dict[str, Any] = {
    "delayed": recipe.DelayedScaling(amax_history_len=16),
    "tensorwise": recipe.Float8CurrentScaling(),
    "rowwise": recipe.Float8RowwiseScaling(),
    "blockwise": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
}
WITH_FP4 = RECIPES | {"nvfp4": recipe.NVFP4BlockScaling()}
"""For products and casts by themselves."""


@dataclass(frozen=True)
class OneLinear:
    """The sizes of a single linear, [N, K]."""

    n: int
    k: int

    def weights(self) -> dict[str, tuple[int, int]]:
        """As Sizes.weights."""
        return {"linear": (self.n, self.k)}


def build(
    sizes: Sizes | OneLinear, weights: dict[str, nn.Parameter], make: Callable[..., Any], small: Any
) -> Any:
    """The layer, or the linear itself, with linears made by ``make``."""
    if isinstance(sizes, OneLinear):
        return make(weights["linear"], name="linear")
    return Layer(sizes, weights, make, small)


def everyone(
    machine: Machine, sizes: Any, weights: dict[str, nn.Parameter]
) -> tuple[dict[str, Any], dict[str, str]]:
    """(module by name, reason by name of those that are not here)."""
    modules = {"bf16": build(sizes, weights, plain_linear, _small(machine))}
    absent: dict[str, str] = {}
    modules |= ours(machine, sizes, weights, absent=absent)
    for found, missing in (_torchao(machine, sizes, weights), _transformer_engine(machine, sizes, weights)):
        modules |= found
        absent |= missing
    if not machine.dry:
        modules["bf16 compiled"] = torch.compile(build(sizes, weights, plain_linear, _same))
    return modules, absent


def ours(
    machine: Machine,
    sizes: Any,
    weights: dict[str, nn.Parameter],
    *,
    only: tuple[str, ...] = tuple(RECIPES),
    absent: dict[str, str] | None = None,
) -> dict[str, Any]:
    """This package's linears by recipe; weights are quantized anew in every forward."""
    found = {}
    for name in only:
        reason = machine.backend.supports(machine.device, RECIPES[name])
        if reason is not None:
            if absent is not None:
                absent[name] = reason
            continue
        state = Fp8State(machine.device)
        make = partial(Fp8BenchLinear, recipe=RECIPES[name], backend=machine.backend.name, state=state)
        module = build(sizes, weights, make, _small(machine))
        module.fp8_state = state
        found[name] = module
    return found


def _torchao(
    machine: Machine, sizes: Any, weights: dict[str, nn.Parameter]
) -> tuple[dict[str, Any], dict[str, str]]:
    names = {"torchao tensorwise": "tensorwise", "torchao rowwise": "rowwise"}
    if importlib.util.find_spec("torchao") is None:
        return {}, dict.fromkeys(names, "torchao is not installed")
    if machine.dry:
        return {}, dict.fromkeys(names, "dry run: needs a GPU")
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        found = {}
        for label, name in names.items():
            holder = nn.Sequential(build(sizes, weights, plain_linear, _same))
            convert_to_float8_training(holder, config=Float8LinearConfig.from_recipe_name(name))
            found[label] = torch.compile(holder)
        return found, {}
    except Exception as error:  # another version's API: its cells say so
        return {}, dict.fromkeys(names, f"torchao: {type(error).__name__}: {error}".partition("\n")[0][:160])


def _transformer_engine(
    machine: Machine, sizes: Any, weights: dict[str, nn.Parameter]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Its linears in the recipes that both have, by the mapping that training uses."""
    names = {f"TE {name}": name for name in RECIPES}
    if machine.dry:
        return {}, dict.fromkeys(names, engine.unavailable_reason() or "dry run: needs a GPU")
    found, absent = {}, {}
    for label, name in names.items():
        reason = engine.supports(machine.device, RECIPES[name])
        if reason is not None:
            absent[label] = reason.partition("\n")[0][:160]
            continue
        try:
            module = build(sizes, weights, _te_linear, _small(machine))
            found[label] = _Autocast(module, engine.te_recipe(RECIPES[name]))
        except Exception as error:  # another version's API: its cells say so
            absent[label] = f"Transformer Engine: {type(error).__name__}: {error}".partition("\n")[0][:160]
    return found, absent


def _te_linear(weight: nn.Parameter, name: str = "") -> Any:
    import transformer_engine.pytorch as te

    linear = te.Linear(
        in_features=weight.shape[1], out_features=weight.shape[0], bias=False, params_dtype=torch.bfloat16
    )
    linear.weight = weight
    return linear


class _Autocast(nn.Module):
    """A module under Transformer Engine's FP8 context."""

    def __init__(self, module: nn.Module, recipe: Any):
        super().__init__()
        self.module, self.recipe = module, recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with engine.autocast(self.recipe, None):
            return self.module(x)


def _small(machine: Machine) -> Callable[..., Any]:
    """Compiles element-wise functions on a GPU, for all contenders alike."""
    return _same if machine.dry else torch.compile


def _same(function: Any) -> Any:
    return function
