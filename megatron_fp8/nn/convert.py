"""convert_to_fp8: linears become Fp8Linears in place, with a report.

So do modules of experts, whose linears are stacked (experts.py). What is converted changes its class. The module stays
the same object with the same parameters, buffers and hooks, so optimizers, tied weights, references held elsewhere and
state-dict keys are as they were, and a model that is a single linear can be converted too. Rejected: a new module in its
place. It would have to copy all of that, and would miss what it has never heard of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from ..files.argument_check import check_model
from ..files.say import say
from ..files.uncollected import uncollected
from ..plan.notices import say_what_is_padded, say_without_compiler
from ..plan.overrides import check_overrides_match
from ..recipe import Recipe
from .candidates import candidates, fp8_class, matches, rows_with_sizes, skipped_by
from .config import DEFAULT_SKIP, Fp8Config, Skip, as_skip, make_config
from .experts import Fp8ExpertLinear, Fp8Experts, fp8_experts_class
from .fast_path import leave_fast_paths, restore_fast_paths
from .fsdp import disable_fp8_all_gather
from .group import Fp8Group
from .linear import Fp8Layer
from .report import Fp8Report, keep_report

M = TypeVar("M", bound=nn.Module)

DEFAULT: Any = object()
"""The skip list of the config: DEFAULT_SKIP, unless the config has another."""


@uncollected()
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
        ValueError: it is no model, a glob of the user's matches no module, the model has no linear to convert, a setting
            is wrong, the backend cannot run on a weight's device, or a recipe or config is given and a linear, which
            ``skip`` does not name, runs in FP8 already and otherwise than that. The model is unchanged then.
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
    planned = [called for one in found if one.row.planned for called in (one.row.name, *one.also)]
    check_overrides_match(settings.overrides, planned, "overrides")
    chosen = {
        one.name: one.module for one in found if one.row.converted and not isinstance(one.module, Fp8Layer)
    }
    group = Fp8Group(settings, model)
    for name, module in chosen.items():
        module.__class__ = _class_in_fp8(type(module))  # type: ignore[assignment]
        assert isinstance(module, (Fp8Layer, Fp8Experts))
        module.join_group(group, name)
    leave_fast_paths(model)
    keep_report(model, report)
    say(str(report), to="stdout")
    say_without_compiler(next(model.parameters()).device)
    say_what_is_padded({one.row.name: one.padded for one in found if one.padded}, len(report.converted))
    return model


def convert_from_fp8(model: M) -> M:
    """Undo ``convert_to_fp8``: each linear has its own class again, with the weights it has now. In place.

    Raises:
        ValueError: the model has no FP8 linear; or one was sharded by fully_shard, which keeps a class of its own.
    """
    check_model(model)
    converted = [
        module
        for module in model.modules()
        if isinstance(module, (Fp8Layer, Fp8Experts)) and not isinstance(module, Fp8ExpertLinear)
    ]
    if not converted:
        raise ValueError(f"{type(model).__name__} has no FP8 linear to convert back")
    foreign = [
        type(module).__name__ for module in converted if type(module) is not _class_in_fp8(module.plain_class)
    ]
    if foreign:
        raise ValueError(
            f"{foreign[0]} is a subclass of an FP8 linear and cannot become what that was: convert back before"
            " fully_shard, or load the state dict into an unconverted model"
        )
    disable_fp8_all_gather(model)
    for one in converted:
        one.leave_group()
        one.__class__ = one.plain_class  # type: ignore[assignment]
    restore_fast_paths(model)
    for module in model.modules():
        keep_report(module, None)
    return model


def _class_in_fp8(plain: type[nn.Module]) -> type[nn.Module] | None:
    """What a module of this class is converted to."""
    return fp8_class(plain) or fp8_experts_class(plain)


def _check_globs(model: nn.Module, skip: tuple[Skip, ...]) -> None:
    """ValueError for a glob that matches nothing, unless it is one of the defaults: those name what models often have."""
    asked = [pattern for pattern in skip if not callable(pattern) and pattern not in DEFAULT_SKIP]
    names = [name for name, _ in model.named_modules() if name] if asked else []
    for pattern in asked:
        if not any(matches(name, pattern) for name in names):
            raise ValueError(
                f"skip={pattern!r} matches no module of {type(model).__name__}; its modules are {', '.join(names[:8])}"
                f"{', ...' if len(names) > 8 else ''}"
            )


def _check_converted(model: nn.Module, settings: Fp8Config) -> None:
    """ValueError for linears that run in FP8 already and otherwise than is asked for now: neither is silently ignored."""
    for name, module in model.named_modules():
        if not isinstance(module, Fp8Layer) or skipped_by(name, module, settings) is not None:
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
