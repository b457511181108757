"""convert_to_fp8: the linears of a PyTorch model become Fp8Linears, in place, and a table says which and why.

A linear is converted by changing its class. The module stays the same object with the same parameters, buffers and hooks,
so optimizers, tied weights, references held elsewhere and state-dict keys are as they were, and a model that is a single
linear can be converted too. Rejected: a new module in its place. It would have to copy all of that, and would miss what
it has never heard of.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from ..files.say import say
from ..params.fp8_parameter import Fp8Parameter
from ..plan.overrides import check_overrides_match
from ..plan.resolve import choose
from ..recipe import Recipe, recipe_name
from .config import DEFAULT_SKIP, Fp8Config, Skip, as_skip, make_config
from .fast_path import leave_fast_paths, restore_fast_paths
from .fsdp import disable_fp8_all_gather
from .group import Fp8Group
from .linear import Fp8Layer, Fp8Linear
from .report import Fp8Report, Row, keep_report
from .sites import plan_linear

M = TypeVar("M", bound=nn.Module)

DEFAULT: Any = object()
"""The skip list of the config: DEFAULT_SKIP, unless the config has another."""


def convert_to_fp8(
    model: M,
    recipe: Recipe | str | Fp8Config | None = None,
    *,
    config: Fp8Config | None = None,
    skip: Any = DEFAULT,
) -> M:
    """Make the model's linears run in FP8, in place: same parameters, tying, dtype, device, hooks and state-dict keys.

    Prints a table of what was converted, what was not and why (on rank 0), and keeps it as ``model.fp8_report``. The
    converted model runs in FP8 without any context. Training calls ``fp8_step(model)`` once an iteration.

    Args:
        model: any module. Convert before torch.compile and fully_shard; DistributedDataParallel may come before or after.
        recipe: 'tensorwise' (what None means), 'delayed', 'rowwise', 'blockwise', 'mxfp8', or a recipe instance.
        config: an Fp8Config, in place of a recipe (and taken in its place too).
        skip: modules that stay as they are, in place of the config's list: a glob, a function (name, module) -> bool, or
            a list of them. A glob matches a full name or its last part, and covers what is inside the module. The
            default is DEFAULT_SKIP (embeddings, the final norm, the output projection), and linears tied to an embedding.

    Returns:
        The model. A linear that was converted before is left as it is.

    Raises:
        ValueError: a glob of the user's matches no module, the model has no linear to convert, a setting is wrong, the
            backend cannot run on a weight's device, or a recipe or config is given and a linear, which ``skip`` does not
            name, runs in FP8 already and otherwise than that. The model is unchanged then.
    """
    settings = make_config(recipe, config)
    if skip is not DEFAULT:
        if settings.skip != DEFAULT_SKIP and as_skip(skip) != settings.skip:
            raise ValueError("skip is given twice, to convert_to_fp8 and in its config: give it once")
        settings = Fp8Config(**{**vars(settings), "skip": skip})
    _check_globs(model, settings.skip)
    if recipe is not None or config is not None:
        _check_converted(model, settings)
    tied = _embedding_weights(model) if settings.skip == DEFAULT_SKIP else set()
    rows, modules, chosen = [], [], []
    for name, module in _modules_with_weights(model):
        row = _consider(model, name, module, settings, tied)
        rows.append(row)
        modules.append(module)
        if row.converted and not isinstance(module, Fp8Layer):
            chosen.append((name, module))
    report = Fp8Report(_with_sizes(rows, modules), settings.keep_columnwise)
    if not report.converted:
        raise ValueError(_nothing_to_convert(model, report, settings))
    planned = [row.name for row in rows if row.planned]
    check_overrides_match(settings.overrides, planned, "overrides")
    group = Fp8Group(settings, model)
    for name, module in chosen:
        module.__class__ = _fp8_class(module)  # type: ignore[assignment]
        assert isinstance(module, Fp8Layer)
        module.join_group(group, name)
    leave_fast_paths(model)
    keep_report(model, report)
    say(str(report), to="stdout")
    return model


def convert_from_fp8(model: M) -> M:
    """Undo ``convert_to_fp8``: each linear has its own class again, with the weights it has now. In place.

    Raises:
        ValueError: the model has no FP8 linear; or one was sharded by fully_shard, which keeps a class of its own.
    """
    linears = [module for module in model.modules() if isinstance(module, Fp8Layer)]
    if not linears:
        raise ValueError(f"{type(model).__name__} has no FP8 linear to convert back")
    foreign = [
        type(module).__name__ for module in linears if type(module) is not _fp8_class(module.plain_class)
    ]
    if foreign:
        raise ValueError(
            f"{foreign[0]} is a subclass of an FP8 linear and cannot become what that was: convert back before"
            " fully_shard, or load the state dict into an unconverted model"
        )
    disable_fp8_all_gather(model)
    for linear in linears:
        linear.leave_group()
        linear.__class__ = linear.plain_class  # type: ignore[assignment]
    restore_fast_paths(model)
    for module in model.modules():
        keep_report(module, None)
    return model


def matches(name: str, pattern: str) -> bool:
    """Whether a glob matches the name, its last part, or those of a module that it is in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        if fnmatchcase(".".join(parts[:end]), pattern) or fnmatchcase(parts[end - 1], pattern):
            return True
    return False


def _fp8_class(module: nn.Module | type[nn.Module]) -> type[Fp8Layer] | None:
    """The FP8 class of a module that is exactly a linear, or of such a class; None of what is none."""
    kind = module if isinstance(module, type) else type(module)
    if kind is nn.Linear:
        return Fp8Linear
    transformers = sys.modules.get("transformers.pytorch_utils")  # not loaded: no model has a Conv1D
    if transformers is not None and kind is transformers.Conv1D:
        from .conv1d import Fp8Conv1D

        return Fp8Conv1D
    return None


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Fp8Layer) or _fp8_class(module) is not None


def _features(module: Any) -> tuple[int, int]:
    """(out features, in features) of a linear."""
    if isinstance(module, nn.Linear | Fp8Layer):
        return module.out_features, module.in_features
    return module.nf, module.nx  # of a Conv1D


def _modules_with_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of those that hold parameters themselves, or are linears; a shared module once."""
    for name, module in model.named_modules():
        if _is_linear(module) or any(True for _ in module.parameters(recurse=False)):
            yield name, module


def _consider(model: nn.Module, name: str, module: nn.Module, config: Fp8Config, tied: set[int]) -> Row:
    """The module's row: whether it can be converted, and why."""
    weight = next(module.parameters(recurse=False), None)
    kind = type(module).__name__
    shape: tuple[int, ...] = () if weight is None or is_lazy(weight) else tuple(weight.shape)
    if shape and _is_linear(module):
        shape = _features(module)  # its first parameter need not be the weight: weight_norm's is a norm
    dtype = "" if weight is None else str(weight.dtype).removeprefix("torch.")
    if isinstance(module, Fp8Layer):
        recipe = recipe_name(module.fp8_config.resolved_recipe)
        return Row(name, kind, shape, True, recipe, f"is an {kind} already: left as it is")
    reason = _reason_to_skip(model, name, module, config, tied)
    if reason is not None:
        linear = _is_linear(module) or bool(_stacks(module))
        return Row(name, kind, shape, False, dtype, reason, linear=linear)
    device = module.weight.device
    assert isinstance(device, torch.device)
    if device.type == "meta":
        choices = choose(config.asked(), name)
        if choices.none_in_fp8:
            return Row(name, kind, shape, False, dtype, "; ".join(choices.reasons), planned=True)
        reason = "; ".join(
            filter(None, [*choices.reasons, "on the meta device: the backend is chosen where it will run"])
        )
        return Row(name, kind, shape, True, recipe_name(choices.recipe), reason, planned=True)
    plan = plan_linear(config, name, _features(module), device)
    if plan.recipe is None:
        return Row(name, kind, shape, False, dtype, plan.reason, planned=True)
    runs = f"{recipe_name(plan.recipe)}, {plan.backend}"
    return Row(name, kind, shape, True, runs, plan.reason, planned=True)


def _reason_to_skip(
    model: nn.Module, name: str, module: nn.Module, config: Fp8Config, tied: set[int]
) -> str | None:
    skipped = _skipped_by(name, module, config)
    if skipped is not None:
        return skipped
    if not _is_linear(module):
        return _what_it_is(module)
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "MultiheadAttention reads its weight and never calls it"
    if isinstance(module, nn.LazyLinear):
        return "has no shape yet: run a batch through the model, then convert"
    if is_parametrized(module) and _fp8_class(type(module).__bases__[0]) is not None:
        return "is parametrised (weight_norm, ...), its weight computed in each call: convert first, then parametrise"
    if _fp8_class(module) is None:
        return f"{type(module).__name__} is a subclass of nn.Linear, which may compute something else"
    if "forward" in vars(module):
        return "its forward was replaced on the instance, and would go past FP8"
    if id(module.weight) in tied:
        return "tied to an embedding"
    if _is_foreign(module.weight):
        return f"its weight is a {type(module.weight).__name__}, which is no ordinary tensor"
    if module.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{module.weight.dtype} weights cannot be quantised"
    smallest = min(_features(module))
    if smallest < config.min_features:
        return f"{smallest} features: below {config.min_features} FP8 would multiply padding"
    return None


def _skipped_by(name: str, module: nn.Module, config: Fp8Config) -> str | None:
    """Which entry of the skip list names the module, in words."""
    for entry in config.skip:
        if isinstance(entry, str) and matches(name, entry):
            return f"skip {entry!r}"
        if callable(entry) and _is_linear(module) and entry(name, module):
            return f"skip {getattr(entry, '__name__', 'function')}"
    return None


def _is_foreign(weight: Any) -> bool:
    """Whether it is a tensor of a class of somebody's, such as quantised values: FP8 kernels read memory."""
    known = (torch.Tensor, nn.Parameter, FakeTensor, Fp8Parameter)
    return not (type(weight) in known or hasattr(weight, "to_local"))


def _what_it_is(module: nn.Module) -> str:
    """Why something that is no linear stays as it is."""
    stacks = ", ".join(f"{name} {list(shape)}" for name, shape in _stacks(module).items())
    if stacks:
        return f"a stack of matrices stays in high precision, of experts as a rule: {stacks}"
    return "not a linear"


def _stacks(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Its parameters that are several matrices each, with their shapes."""
    if isinstance(module, _ConvNd):
        return {}
    return {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False) if _is_stack(p)}


def _is_stack(parameter: nn.Parameter) -> bool:
    """Whether it is several matrices in one tensor, such as experts that one grouped product multiplies."""
    return not is_lazy(parameter) and parameter.ndim == 3 and min(parameter.shape) > 1


def _with_sizes(rows: list[Row], modules: list[nn.Module]) -> tuple[Row, ...]:
    """The rows, with how much of the model each is. A shared parameter counts once: in an FP8 layer, if one uses it."""
    counted: set[int] = set()
    sized = list(rows)
    for i in sorted(range(len(rows)), key=lambda i: not rows[i].converted):
        own = [p for p in modules[i].parameters(recurse=False) if not is_lazy(p)]
        weights = sum(p.numel() for p in own if id(p) not in counted)
        counted.update(id(p) for p in own)
        lazy = any(is_lazy(p) for p in modules[i].parameters(recurse=False))
        sized[i] = replace(rows[i], weights=weights, multiplied=_multiplied(modules[i], own), lazy=lazy)
    return tuple(sized)


def _multiplied(module: nn.Module, own: list[nn.Parameter]) -> int:
    """How many of its values a token is multiplied by. Of a module that is not known here: those of its matrices."""
    if _is_linear(module) and own:
        return math.prod(_features(module))
    if isinstance(module, nn.Embedding | nn.EmbeddingBag | _ConvNd | ParametrizationList):
        return 0  # a parametrization's values are multiplied by its layer, which is counted
    return sum(p.numel() for p in own if p.squeeze().ndim == 2 or _is_stack(p))


def _embedding_weights(model: nn.Module) -> set[int]:
    return {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}


def _check_globs(model: nn.Module, skip: tuple[Skip, ...]) -> None:
    """ValueError for a glob that matches nothing, unless it is one of the defaults: those name what models often have."""
    names = [name for name, _ in model.named_modules() if name]
    for pattern in skip:
        if callable(pattern) or pattern in DEFAULT_SKIP:
            continue
        if not any(matches(name, pattern) for name in names):
            raise ValueError(
                f"skip={pattern!r} matches no module of {type(model).__name__}; its modules are {', '.join(names[:8])}"
                f"{', ...' if len(names) > 8 else ''}"
            )


def _check_converted(model: nn.Module, settings: Fp8Config) -> None:
    """ValueError for linears that run in FP8 already and otherwise than is asked for now: neither is silently ignored."""
    for name, module in model.named_modules():
        if not isinstance(module, Fp8Layer) or _skipped_by(name, module, settings) is not None:
            continue
        differing = module.fp8_config.differing(settings)
        if differing:
            runs = ", ".join(f"{field}={mine!r}" for field, (mine, _) in differing.items())
            asked = ", ".join(f"{field}={its!r}" for field, (_, its) in differing.items())
            raise ValueError(
                f"{name or type(model).__name__} runs in FP8 already, with {runs}, and {asked} is asked for: to change it"
                " call convert_from_fp8(model) first, to leave it name it in skip, and for some calls only there is"
                " fp8_autocast(recipe=...)"
            )


def _nothing_to_convert(model: nn.Module, report: Fp8Report, config: Fp8Config) -> str:
    linears = [(row.name, row.reason) for row in report.rows if row.linear]
    if not linears:
        return f"{type(model).__name__} has no nn.Linear: there is nothing to convert to FP8"
    reasons = "; ".join(f"{name or type(model).__name__}: {reason}" for name, reason in linears[:6])
    return (
        f"no linear of {type(model).__name__} would run in FP8 ({reasons}): change skip, min_features or the size filter,"
        " or leave the model as it is"
    )
