"""Finds the FP8 linears of a model by name, and their groups."""

from __future__ import annotations

from typing import Any

import torch

from ..files.argument_check import check_model
from ..linear.gemm_site import GemmSite
from .fp8_group import Fp8Group
from .linear import Fp8Layer
from .sites import transfer_state

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def fp8_linears(model: torch.nn.Module) -> dict[str, Fp8Layer]:
    """Name -> FP8 linear of a model, bare or wrapped. A shared linear has its first name. Raises ValueError
    if there is none.

    Names are those in the bare model, without the prefixes of torch.compile, checkpoint wrappers and
    DistributedDataParallel.
    """
    check_model(model)
    found: dict[str, Fp8Layer] = {}
    added: set[str] = set()  # names whose last part is a wrapper's
    for name, module in model.named_modules():
        if list(module._modules) == ["module"] and not module._parameters:  # a wrapper has nothing else
            added.add(f"{name}.module" if name else "module")
        if isinstance(module, Fp8Layer):
            parts = name.split(".")
            plain = [
                part
                for i, part in enumerate(parts)
                if part not in _WRAPPERS and ".".join(parts[: i + 1]) not in added
            ]
            found[".".join(plain)] = module
    if not found:
        raise ValueError(f"{type(model).__name__} has no FP8 linear: call convert_to_fp8(model) first")
    return found


def groups_of(model: torch.nn.Module) -> list[Fp8Group]:
    """The groups of a model's linears. Linears created one by one are merged into one group here."""
    linears = fp8_linears(model)
    by_config: dict[Any, dict[str, Fp8Layer]] = {}
    for name, linear in linears.items():
        if linear.fp8_group.is_standalone:
            by_config.setdefault(linear.fp8_config, {})[name] = linear
    for config, standalone in by_config.items():
        _merge(Fp8Group(config, model), standalone)
    return list({id(linear.fp8_group): linear.fp8_group for linear in linears.values()}.values())


def _merge(group: Fp8Group, linears: dict[str, Fp8Layer]) -> None:
    """Move these linears into a group, with the amaxes that their slots have recorded."""
    recorded: dict[str, GemmSite] = {}
    for name, linear in linears.items():
        before = linear.fp8_group
        if before.states:
            recorded[name] = linear.fp8_site
            for state in before.states.values():
                group.state(linear.fp8_device).merge_iteration(state)
        sites = linear.fp8_sites
        linear.leave_group()
        linear.join_group(group, name)
        linear.fp8_sites.follow(sites)
    group.make_all_sites()  # in the same order on all ranks, whichever linears have run there
    for name, site in recorded.items():
        transfer_state(site, linears[name].fp8_site)
    for linear in linears.values():
        linear.fp8_sites.quantize(linear.weight_parameter, linear.fp8_device)
