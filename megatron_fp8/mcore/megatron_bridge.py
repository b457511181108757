"""Conversion of Hugging Face checkpoints by Megatron-Bridge, for this package's experts and FP8 weights.

Megatron-Bridge reads and writes weights by the names of Transformer Engine's grouped experts,
``experts.linear_fc1.weight3``. Experts here are linears of their own,
``experts.local_experts.3.linear_fc1.weight``: most of its models have no mapping for them, and with several expert
parallel ranks it takes a rank's number for the model's. Its export reads FP8 weights from their codes. After
``install()`` both names work, and an export has the values of a checkpoint: masters rounded to the weight's dtype.

It imports Transformer Engine at its top, for adapters. Where that is not installed, ``install()`` imports it with names
that fail when they are called. Afterwards they are gone, and HAVE_TE is False in Megatron-Core's modules that saw them.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ..params.fp8_parameter import Fp8Parameter
from . import environment
from .checkpoint.live_weights import local_value
from .patches.patching import PatchList, PatchSet

patches = PatchList("megatron.bridge.models.conversion")
_GROUPED = re.compile(r"\.experts\.(linear_fc[12]\.(?:weight|bias))(\*|\d+)$")
_LOCAL = re.compile(r"\.experts\.local_experts\.(\*|\d+)\.(linear_fc[12]\.(?:weight|bias))$")


def install() -> None:
    """Prepares Megatron-Bridge, once per process, before it is imported; ``megatron_fp8.mcore.install()`` comes first.
    Further calls do nothing.

    Raises:
        RuntimeError: Megatron-Bridge is missing, of another series, or lacks a name that is patched.
    """
    with nullcontext() if environment.has_te() else _absent_names():
        environment.require_bridge()
        _patch_set.apply()


class _Absent(type):
    """The class of a missing class, whose attributes are missing classes too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AbsentName


class _AbsentName(metaclass=_Absent):
    """A class of Transformer Engine: it can be named and derived from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("this part of Megatron-Bridge needs Transformer Engine, which is not installed")


@contextmanager
def _absent_names() -> Iterator[None]:
    """Inside, Transformer Engine can be imported, as names without code."""
    parent, child = (ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch"))
    child.__getattr__ = partial(getattr, _AbsentName)  # type: ignore[method-assign]
    parent.pytorch = child  # type: ignore[attr-defined]
    before = set(sys.modules)
    sys.modules.update({module.__name__: module for module in (parent, child)})
    try:
        yield
    finally:
        for name in sys.modules.keys() - before:
            if name.startswith("megatron.core.") and getattr(sys.modules[name], "HAVE_TE", False) is True:
                sys.modules[name].HAVE_TE = False  # type: ignore[attr-defined]
        for module in (parent, child):
            sys.modules.pop(module.__name__, None)


def _as_grouped(name: str) -> str:
    """'...experts.local_experts.3.linear_fc1.weight' -> '...experts.linear_fc1.weight3'; other names stay."""
    return _LOCAL.sub(r".experts.\2\1", name)


def _as_local(name: str) -> str:
    """The inverse of ``_as_grouped``."""
    return _GROUPED.sub(r".experts.local_experts.\2.\1", name)


@patches.wrap(
    "mapping_registry.MegatronMappingRegistry.__init__", "most models have no mapping of local experts"
)
def with_local_experts(original: Callable[..., None], self: Any, *mappings: Any) -> None:
    """Adds the mapping of an expert's own linear beside that of the grouped one."""
    known = {mapping.megatron_param for mapping in mappings}
    added = []
    for mapping in mappings:
        name = _as_local(mapping.megatron_param)
        if name not in known:
            local = copy.copy(mapping)
            local.megatron_param = name
            added.append(local)
    original(self, *mappings, *added)


@patches.wrap("model_bridge._megatron_local_name_to_global", "local experts keep the rank's number")
def global_expert_name(
    original: Callable[..., str], models: Any, config: Any, param_name: str, *args: Any, **kwargs: Any
) -> str:
    """The name with the model's number of the expert."""
    grouped = _as_grouped(param_name)
    name = original(models, config, grouped, *args, **kwargs)
    return name if grouped == param_name else _as_local(name)


@patches.wrap(
    "param_mapping.MegatronParamMapping.gather_from_ep_ranks", "it reads an expert's number from a name's end"
)
def gather_local_experts(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Gathers the experts of all ranks, under either name."""
    name = self.megatron_param
    self.megatron_param = _as_grouped(name)
    try:
        return original(self, *args, **kwargs)
    finally:
        self.megatron_param = name


def give_value(original: Callable[..., Any], self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Reads an FP8 weight's value in place of its codes."""
    if isinstance(tensor, Fp8Parameter):
        tensor = whole_value(tensor, expert=self.is_expert)
    return original(self, tensor, *args, **kwargs)


for _reader in (
    "broadcast_from_pp_rank",
    "maybe_dequantize",
):  # the first thing that a mapping does, and that others do
    patches.wrap(f"param_mapping.MegatronParamMapping.{_reader}", "it reads FP8 weights from their codes")(
        give_value
    )


@patches.wrap(
    "param_mapping.MegatronParamMapping.scatter_to_tp_ranks",
    "gloo reads the columns of a weight as if they were contiguous: wrong values, and no error",
)
def scatter_contiguous(
    original: Callable[..., Any], self: Any, splits: Any, *args: Any, **kwargs: Any
) -> Any:
    """Sends each rank its part in its own memory, as a copy to a GPU would be."""
    return original(self, splits and [part.contiguous() for part in splits], *args, **kwargs)


@torch.no_grad()
def whole_value(weight: Fp8Parameter, *, expert: bool) -> torch.Tensor:
    """Returns a weight's value [rows, cols] in its nominal dtype, rounded from its masters. Collective over the data
    parallel ranks that hold parts of them (``expert``: those of experts)."""
    start, value = local_value(weight)
    if start is None:
        return value
    whole = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    whole.view(-1)[start : start + value.numel()] = value
    group = (
        parallel_state.get_expert_data_parallel_group()
        if expert
        else parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    # As bytes: of each value one rank has the bits, and all others have zeros.
    dist.all_reduce(whole.view(torch.uint8), op=dist.ReduceOp.MAX, group=group)
    return whole


_patch_set = PatchSet(patches)
