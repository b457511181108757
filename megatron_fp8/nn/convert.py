"""convert_to_fp8: linears become Fp8Linears in place, with a report.

Expert modules, whose linears are stacked (experts.py), are converted too. A conversion changes the module's
class only. The object, its parameters, buffers and hooks stay the same, so optimizers, tied weights, other
references and state-dict keys remain valid. A model that is itself a linear can be converted.

Rejected: replacing the module by a new one. That needs a copy of all its state, and misses attributes that
the code does not know.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from ..files.argument_check import check_model
from ..files.gc_pause import gc_paused
from ..files.terminal import print_rank_0
from ..plan.overrides import check_overrides_match
from ..plan.resolve import warn_no_compiler, warn_padding
from ..recipe import Recipe
from .config import DEFAULT_SKIP, Fp8Config, Skip, as_skip, make_config
from .experts import Fp8ExpertLinear, Fp8Experts, fp8_experts_class
from .fp8_group import Fp8Group
from .fsdp import disable_fp8_all_gather
from .linear import Fp8Layer, Fp8Linear
from .module_filter import candidates, fp8_class, matches, rows_with_sizes, skipped_by
from .report import Fp8Report, keep_report

M = TypeVar("M", bound=nn.Module)

DEFAULT: Any = object()
"""Stands for the config's skip list (DEFAULT_SKIP by default)."""


@gc_paused()
def convert_to_fp8(
    model: M,
    recipe: Recipe | str | Fp8Config | None = None,
    *,
    config: Fp8Config | None = None,
    skip: Any = DEFAULT,
) -> M:
    """Make the model's linears run in FP8, in place. Parameters, tying, dtype, device, hooks and state-dict
    keys stay the same.

    Prints a table of converted and skipped modules with reasons (on rank 0) and stores it as
    ``model.fp8_report``. The converted model runs in FP8 without any context. In training, call
    ``fp8_step(model)`` once an iteration.

    Args:
        model: any module. Convert before torch.compile and fully_shard; DistributedDataParallel may come
            before or after.
        recipe: a name in megatron_fp8.recipe.RECIPES ('tensorwise' by default), or a recipe instance.
            An Fp8Config is accepted too.
        config: an Fp8Config; use instead of ``recipe``.
        skip: modules to leave in high precision; replaces the config's list. A glob, a function (name,
            module) -> bool, or a list of them. A glob matches a full name or its last part, and covers all
            submodules. The default is DEFAULT_SKIP (embeddings, the final norm, the output projection) plus
            linears tied to an embedding.

    Returns:
        The model. Linears that were converted before are unchanged.

    Raises:
        ValueError: the argument is not a model; a glob of the user's matches no module; the model has no
            linear to convert; a setting is wrong; the backend cannot run on a weight's device; or the recipe
            or config differs from that of an FP8 linear that ``skip`` does not name. The model is unchanged
            then.
    """
    check_model(model)
    settings = make_config(recipe, config)
    if skip is not DEFAULT:
        if settings.skip != DEFAULT_SKIP and as_skip(skip) != settings.skip:
            raise ValueError("skip is given twice, to convert_to_fp8 and in its config: give it once")
        settings = replace(settings, skip=skip)
    _check_globs(model, settings.skip)
    if recipe is not None or config is not None:
        _check_converted(model, settings)
    found = candidates(model, settings)
    report = Fp8Report(rows_with_sizes(found), settings.keep_columnwise)
    if not report.converted:
        raise ValueError(_nothing_to_convert(model, report, settings))
    planned = [called for linear in found if linear.row.planned for called in (linear.row.name, *linear.also)]
    check_overrides_match(settings.overrides, planned, "overrides")
    chosen = {
        linear.name: linear.module
        for linear in found
        if linear.row.converted and not isinstance(linear.module, Fp8Layer)
    }
    group = Fp8Group(settings, model)
    for name, module in chosen.items():
        module.__class__ = _class_in_fp8(type(module))  # type: ignore[assignment]
        assert isinstance(module, (Fp8Layer, Fp8Experts))
        module.join_group(group, name)
    _leave_fast_paths(model)
    keep_report(model, report)
    print_rank_0(str(report), to="stdout")
    warn_no_compiler(next(model.parameters()).device)
    warn_padding({linear.row.name: linear.padded for linear in found if linear.padded}, len(report.converted))
    return model


def convert_from_fp8(model: M) -> M:
    """Undo ``convert_to_fp8`` in place. Each linear regains its original class and keeps its current weights.

    Raises:
        ValueError: the model has no FP8 linear; or fully_shard has changed a linear's class.
    """
    check_model(model)
    converted = [
        module
        for module in model.modules()
        if isinstance(module, (Fp8Layer, Fp8Experts)) and not isinstance(module, Fp8ExpertLinear)
    ]
    if not converted:
        raise ValueError(f"{type(model).__name__} has no FP8 linear to convert back")
    sharded = [
        type(module).__name__ for module in converted if type(module) is not _class_in_fp8(module.plain_class)
    ]
    if sharded:
        raise ValueError(
            f"{sharded[0]} is a subclass of an FP8 linear and cannot be converted back: call convert_from_fp8 before"
            " fully_shard, or load the state dict into an unconverted model"
        )
    disable_fp8_all_gather(model)
    for linear in converted:
        linear.leave_group()
        linear.__class__ = linear.plain_class  # type: ignore[assignment]
    _restore_fast_paths(model)
    for module in model.modules():
        keep_report(module, None)
    return model


def _class_in_fp8(plain: type[nn.Module]) -> type[nn.Module] | None:
    """The FP8 class for a module of this class."""
    return fp8_class(plain) or fp8_experts_class(plain)


def _check_globs(model: nn.Module, skip: tuple[Skip, ...]) -> None:
    """Raises ValueError for a glob that matches no module. Globs of DEFAULT_SKIP may match none."""
    patterns = [pattern for pattern in skip if not callable(pattern) and pattern not in DEFAULT_SKIP]
    names = [name for name, _ in model.named_modules() if name] if patterns else []
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise ValueError(
                f"skip={pattern!r} matches no module of {type(model).__name__}; its modules are {', '.join(names[:8])}"
                f"{', ...' if len(names) > 8 else ''}"
            )


def _check_converted(model: nn.Module, settings: Fp8Config) -> None:
    """Raises ValueError if FP8 linears of the model run with other settings than the requested ones."""
    for name, module in model.named_modules():
        if not isinstance(module, Fp8Layer) or skipped_by(name, module, settings) is not None:
            continue
        differing = module.fp8_config.differences(settings)
        if differing:
            runs = ", ".join(f"{field}={own_value!r}" for field, (own_value, _) in differing.items())
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


# ---------------------------------------------------------------------------------------- torch's transformer encoder

# TransformerEncoderLayer runs one fused kernel over its linears' weights where no gradient is needed, and
# TransformerEncoder passes it sequences without padding (nested tensors). These bypass the linears' forward: a
# converted layer would silently run in high precision, or fail. Both are disabled where a linear inside was
# converted, by the conditions that torch checks: a hook on any submodule, and the encoder's
# ``use_nested_tensor``.
#
# The two hooks below do nothing; they mark what was disabled. torch copies and pickles hooks with the module,
# so a copy can be converted back too.


def _leave_fast_paths(model: nn.Module) -> None:
    """Disable the fused kernels of encoders that contain converted linears."""
    for module in model.modules():
        if not isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerEncoder)):
            continue
        inside = next((m for m in module.modules() if isinstance(m, Fp8Linear)), None)
        if inside is None:
            continue
        if isinstance(module, nn.TransformerEncoderLayer) and not _has(inside, no_fused_kernel):
            inside.register_forward_pre_hook(no_fused_kernel)
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
            module.use_nested_tensor = False
            module.register_forward_pre_hook(nested_tensors_before)


def _restore_fast_paths(model: nn.Module) -> None:
    """Undo ``_leave_fast_paths``."""
    for module in model.modules():
        _remove(module, no_fused_kernel)
        if isinstance(module, nn.TransformerEncoder) and _remove(module, nested_tensors_before):
            module.use_nested_tensor = True


def no_fused_kernel(module: nn.Module, args: Any) -> None:
    """An empty hook. Its presence makes torch skip the layer's fused kernel."""


def nested_tensors_before(module: nn.Module, args: Any) -> None:
    """An empty hook that marks an encoder which used nested tensors before the conversion."""


def _has(module: nn.Module, hook: Any) -> bool:
    return hook in module._forward_pre_hooks.values()


def _remove(module: nn.Module, hook: Any) -> bool:
    """Remove the hook; returns whether it was there."""
    keys = [key for key, found in module._forward_pre_hooks.items() if found is hook]
    for key in keys:
        del module._forward_pre_hooks[key]
    return bool(keys)
