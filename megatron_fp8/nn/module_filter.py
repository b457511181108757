"""Selects the modules of a model to convert to FP8, with a reason for each."""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase, translate
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from ..params.fp8_parameter import Fp8Parameter
from ..plan.resolve import cast_specs, padded_note
from ..recipe import recipe_name
from .config import DEFAULT_SKIP, Fp8Config
from .expert_modules import Stack, kind_of
from .experts import Fp8ExpertLinear, Fp8Experts, expert_count, override_names, site_name
from .linear import Fp8Layer, Fp8Linear
from .report import Row
from .sites import plan_linear

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Candidate:
    """A module of the model, or one linear of an expert module, with its row of the report.

    Attributes:
        row: the report's row; sizes are filled in later.
        name, module: the module, or the expert module that contains the linear.
        own: parameter key -> number of values. The key identifies a parameter, or one expert's part of it.
        multiplied: number of these values that each token is multiplied by.
        lazy: the module has parameters without a shape yet.
        also: other names under which overrides match it.
        padded: note on GEMM padding of the weight on this GPU; '' if there is none.
    """

    row: Row
    name: str
    module: nn.Module
    own: dict[Any, int] = field(default_factory=dict)
    multiplied: int = 0
    lazy: bool = False
    also: tuple[str, ...] = ()
    padded: str = ""


def candidates(model: nn.Module, config: Fp8Config) -> list[Candidate]:
    """All candidates in module order; a shared module appears once."""
    tied = _embedding_weights(model) if config.skip == DEFAULT_SKIP else set()
    found: list[Candidate] = []
    for name, module in model.named_modules():
        if isinstance(module, Fp8Experts):
            continue  # its linears are modules of their own
        if is_linear(module) or any(True for _ in module.parameters(recurse=False)):
            found += _candidates_of(name, module, config, tied)
    return found


def rows_with_sizes(found: list[Candidate]) -> tuple[Row, ...]:
    """Report rows with their sizes. A shared parameter counts once, in an FP8 layer if one uses it."""
    counted: set[Any] = set()
    rows = [candidate.row for candidate in found]
    for i in sorted(range(len(rows)), key=lambda i: not rows[i].converted):
        own = found[i].own
        weights = sum(values for key, values in own.items() if key not in counted)
        counted.update(own)
        rows[i] = replace(rows[i], weights=weights, multiplied=found[i].multiplied, lazy=found[i].lazy)
    return tuple(rows)


@functools.lru_cache(maxsize=2**14)  # every linear checks the same parents
def matches(name: str, pattern: str) -> bool:
    """Whether a glob matches the full name, its last part, or either of these for a parent module."""
    parent, _, last = name.rpartition(".")
    if parent and matches(parent, pattern):
        return True
    return fnmatchcase(name, pattern) or fnmatchcase(last, pattern)


@functools.lru_cache(maxsize=2**14)
def _any_matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the globs ``matches`` the name. One compiled pattern serves all globs."""
    parent, _, last = name.rpartition(".")
    if parent and _any_matches(parent, patterns):
        return True
    match = _glob_matcher(patterns)
    return match(last) is not None or match(name) is not None


@functools.cache
def _glob_matcher(globs: tuple[str, ...]) -> Callable[[str], Any]:
    """Returns a function that matches a name against any of these globs, as fnmatchcase does."""
    return re.compile("|".join(map(translate, globs)) or r"(?!)").match


def fp8_class(module: nn.Module | type[nn.Module]) -> type[Fp8Layer] | None:
    """The FP8 class for an nn.Linear or transformers' Conv1D, given as module or class; None for all others, subclasses
    included."""
    kind = module if isinstance(module, type) else type(module)
    if kind is nn.Linear:
        return Fp8Linear
    transformers = sys.modules.get("transformers.pytorch_utils")  # not loaded: no model has a Conv1D
    if transformers is not None and kind is transformers.Conv1D:
        from .conv1d import Fp8Conv1D

        return Fp8Conv1D
    return None


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a linear layer, in FP8 or not."""
    return isinstance(module, (nn.Linear, Fp8Layer)) or fp8_class(module) is not None


def skipped_by(name: str, module: nn.Module, config: Fp8Config) -> str | None:
    """The skip entry that matches the module, as text for the report; None if none does."""
    globs = tuple(entry for entry in config.skip if isinstance(entry, str))
    if len(globs) == len(config.skip) and not _any_matches(name, globs):
        return None
    for entry in config.skip:
        if isinstance(entry, str) and matches(name, entry):
            return f"skip {entry!r}"
        if callable(entry) and any(entry(*arguments) for arguments in _linears_of(name, module)):
            return f"skip {getattr(entry, '__name__', 'function')}"
    return None


def _linears_of(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) pairs to pass to a skip function: the linear itself; for experts, the linears of the first expert
    on the meta device."""
    if is_linear(module):
        return [(name, module)]
    kind = kind_of(type(module))
    if kind is None:
        return []
    found: list[tuple[str, nn.Module]] = []
    for stack in kind.stacks(module):
        rows, cols = stack.features(module)
        found.append((site_name(name, 0, stack), nn.Linear(cols, rows, bias=False, device="meta")))
    return found


def _candidates_of(name: str, module: nn.Module, config: Fp8Config, tied: set[int]) -> list[Candidate]:
    """Candidates of one module: one for an ordinary module, one per linear for experts."""
    if isinstance(module, Fp8Layer):
        return [_converted_candidate(name, module)]
    parameters = list(module.parameters(recurse=False))
    weight = parameters[0] if parameters else None
    reason = _reason_to_skip(name, module, config, tied)
    kind = kind_of(type(module))
    if reason is None and kind is not None:
        return list(_expert_candidates(name, module, kind.stacks(module), config))
    if reason is None:
        row, padded = _plan_row(name, type(module).__name__, _features(module), module.weight, config)
        return [_candidate(row, module, parameters, padded)]
    shape: tuple[int, ...] = () if weight is None or is_lazy(weight) else tuple(weight.shape)
    if shape and is_linear(module):
        shape = _features(module)  # its first parameter need not be the weight: weight_norm's is a norm
    dtype = "" if weight is None else _dtype_name(weight.dtype)
    linear = is_linear(module) or bool(_stacks(module))
    row = Row(name, type(module).__name__, shape, False, dtype, reason, linear=linear)
    return [_candidate(row, module, parameters)]


def _converted_candidate(name: str, module: Fp8Layer) -> Candidate:
    recipe = recipe_name(module.fp8_config.resolved_recipe)
    reason = f"is an {type(module).__name__} already: left as it is"
    row = Row(name, type(module).__name__, _features(module), True, recipe, reason)
    found = _candidate(row, module, list(module.parameters(recurse=False)))
    if isinstance(module, Fp8ExpertLinear) and not found.own:
        found.own, found.multiplied = module.values(), math.prod(_features(module))
    return found


def _expert_candidates(
    name: str, module: nn.Module, stacks: tuple[Stack, ...], config: Fp8Config
) -> Iterator[Candidate]:
    """One candidate per linear of each expert."""
    count = expert_count(module, stacks)
    for number in range(count):
        for stack in stacks:
            also = override_names(name, stack)
            weight, shape = getattr(module, stack.parameter), stack.features(module)
            row, padded = _plan_row(
                site_name(name, number, stack), type(module).__name__, shape, weight, config, also=also
            )
            parameters = [getattr(module, of) for of in (stack.parameter, stack.bias) if of]
            own = {(id(parameter), number): parameter.numel() // count for parameter in parameters}
            yield Candidate(row, name, module, own, math.prod(shape), also=also, padded=padded)


def _plan_row(
    name: str,
    kind: str,
    shape: tuple[int, int],
    weight: Any,
    config: Fp8Config,
    *,
    also: tuple[str, ...] = (),
) -> tuple[Row, str]:
    """(row, padding note) of a linear, as its plan decides (see `Candidate.padded`)."""
    dtype, device = _dtype_name(weight.dtype), weight.device
    assert isinstance(device, torch.device)
    if device.type == "meta":
        specs = cast_specs(config.request(), name, also=also)
        if specs.none_in_fp8:
            return Row(name, kind, shape, False, dtype, "; ".join(specs.reasons), planned=True), ""
        reason = "; ".join(
            filter(None, [*specs.reasons, "on the meta device: the backend is chosen where it will run"])
        )
        return Row(name, kind, shape, True, recipe_name(specs.recipe), reason, planned=True), ""
    plan = plan_linear(config, name, shape, device, also=also)
    if plan.recipe is None:
        return Row(name, kind, shape, False, dtype, plan.reason, planned=True), ""
    gemms = cast_specs(config.request(), name, also=also).recipe_names()
    same = set(gemms.values()) == {recipe_name(plan.recipe)}
    words = ", ".join(f"{gemm} {recipe or dtype}" for gemm, recipe in gemms.items())
    runs = f"{recipe_name(plan.recipe) if same else words}, {plan.backend}"
    padded = padded_note(plan, device, *shape) or ""
    reason = "; ".join(filter(None, [plan.reason, padded]))
    return Row(name, kind, shape, True, runs, reason, planned=True), padded


# ---------------------------------------------------------------------------------------------------------------- why not


def _reason_to_skip(name: str, module: nn.Module, config: Fp8Config, tied: set[int]) -> str | None:
    skipped = skipped_by(name, module, config)
    if skipped is not None:
        return skipped
    if kind_of(type(module)) is not None:
        return _reason_to_skip_experts(module, config)
    if not is_linear(module):
        return _reason_not_linear(module)
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "MultiheadAttention reads its weight and never calls it"
    if isinstance(module, nn.LazyLinear):
        return "has no shape yet: run a batch through the model, then convert"
    if is_parametrized(module) and fp8_class(type(module).__bases__[0]) is not None:
        return "is parametrised (weight_norm, ...), its weight computed in each call: convert first, then parametrise"
    if fp8_class(module) is None:
        return f"{type(module).__name__} is a subclass of nn.Linear, which may compute something else"
    if not isinstance(getattr(module, "weight", None), torch.Tensor):
        return "has no weight: another library has quantized it, and may load it dequantized"
    if id(module._parameters.get("weight")) in tied:
        return "tied to an embedding"
    return _reason_to_skip_weights(module, [module.weight], [_features(module)], config)


def _reason_to_skip_experts(module: nn.Module, config: Fp8Config) -> str | None:
    """Why a module of a supported expert class stays in high precision; None if it converts."""
    if is_parametrized(module):
        return "is parametrised, its weights computed in each call: convert first, then parametrise"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are distributed over ranks by transformers: use megatron_fp8.mcore for FP8"
    kind = kind_of(type(module))
    assert kind is not None
    stacks = kind.stacks(module)
    weights = [getattr(module, stack.parameter, None) for stack in stacks]
    for stack, weight in zip(stacks, weights, strict=True):
        if not isinstance(weight, torch.Tensor) or weight.ndim != 3:
            return f"its {stack.parameter} is no tensor of three dimensions, [experts, out, in]"
        if hasattr(weight, "to_local"):
            return "its weights are sharded already: convert before fully_shard"
    return _reason_to_skip_weights(module, weights, [stack.features(module) for stack in stacks], config)


def _reason_to_skip_weights(
    module: nn.Module, weights: list[Any], features: list[tuple[int, int]], config: Fp8Config
) -> str | None:
    if "forward" in vars(module):
        return "its forward was replaced on the instance, and would bypass FP8"
    for weight in weights:
        if _is_unsupported_tensor(weight):
            return f"its weight is a {type(weight).__name__}, which is no ordinary tensor"
        if weight.dtype not in _DTYPES:
            return f"{weight.dtype} weights cannot be quantized"
    smallest = min(min(shape) for shape in features)
    if smallest < config.min_features:
        return f"{smallest} features: below {config.min_features} FP8 would multiply padding"
    return None


def _is_unsupported_tensor(weight: Any) -> bool:
    """Whether the tensor belongs to an unsupported subclass, e.g. another library's quantized tensor. FP8 kernels need
    plain memory."""
    known = (torch.Tensor, nn.Parameter, FakeTensor, Fp8Parameter)
    return not (type(weight) in known or hasattr(weight, "to_local"))


def _reason_not_linear(module: nn.Module) -> str:
    """Why a module that is not a linear stays as it is."""
    stacks = ", ".join(f"{name} {list(shape)}" for name, shape in _stacks(module).items())
    if stacks:
        return f"a stack of matrices stays in high precision, of experts whose forward is not known here: {stacks}"
    weight = module._parameters.get("weight")
    if type(module).__name__.endswith(("Router", "Gate")) and weight is not None and weight.ndim == 2:
        return "a router, whose scores choose experts: stays in high precision"
    return "not a linear"


# ------------------------------------------------------------------------------------------------------------------ sizes


def _candidate(row: Row, module: nn.Module, parameters: list[nn.Parameter], padded: str = "") -> Candidate:
    """A candidate from a report row; ``parameters`` are the module's own."""
    own = [p for p in parameters if not is_lazy(p)]
    values, lazy = {id(p): p.numel() for p in own}, len(own) < len(parameters)
    return Candidate(row, row.name, module, values, _values_per_token(module, own), lazy, padded=padded)


def _values_per_token(module: nn.Module, own: list[nn.Parameter]) -> int:
    """Number of values that each token is multiplied by. For unknown modules: the values of their matrices."""
    if is_linear(module) and own:
        return math.prod(_features(module))
    if isinstance(module, nn.Embedding | nn.EmbeddingBag | _ConvNd | ParametrizationList):
        return 0  # the layer of a parametrization counts its values
    return sum(p.numel() for p in own if p.squeeze().ndim == 2 or _is_stack(p))


def _features(module: Any) -> tuple[int, int]:
    """(out features, in features) of a linear."""
    if isinstance(module, (nn.Linear, Fp8Layer)):
        return module.out_features, module.in_features
    return module.nf, module.nx  # Conv1D


def _stacks(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the module's parameters that stack several matrices."""
    if isinstance(module, _ConvNd):
        return {}
    return {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False) if _is_stack(p)}


def _is_stack(parameter: nn.Parameter) -> bool:
    """Whether a tensor stacks several matrices, such as experts of a grouped GEMM."""
    return not is_lazy(parameter) and parameter.ndim == 3 and min(parameter.shape) > 1


def _embedding_weights(model: nn.Module) -> set[int]:
    embeddings = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    weights = [module._parameters.get("weight") for module in embeddings]
    return {id(weight) for weight in weights if weight is not None}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
