"""Copies of a model: moving averages, and references of preference losses.

``copy.deepcopy`` of a Megatron-Core model raises TypeError, in BF16 too: its modules hold process groups, and experts'
dispatchers what the last forward computed. Here groups are shared, and results of computations are copied as values.
A copy has FP8 state of its own, which begins with the model's histories, its iteration and its guard's moves.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..linear.fitted import FittedQuantizer, replaced_by
from ..params.fp8_parameter import Fp8Parameter
from .checkpoint.state_dict import fp8_state_dict, load_fp8_state_dict
from .runtime import runtime_of, unwrap
from .sites import fp8_linears, prepare

T = TypeVar("T", torch.nn.Module, list[torch.nn.Module])


def copy_model(model: T) -> T:
    """A copy of a model in the same layout, with memory of its own; between two iterations.

    Args:
        model: as GPTModel or Float16Module has it, not in DistributedDataParallel, whose buffers belong to an optimizer;
            of a virtual pipeline the list of this rank's chunks, whose FP8 state is one.

    Its parameters have no gradients; they have the flags that Megatron-Core set on them (tensor_model_parallel, ...).
    Collective where FP8 is. Raises ValueError for a model in DistributedDataParallel, for one chunk of several, or if FP8
    cannot run as the config asks.
    """
    chunks: list[Any] = model if isinstance(model, list) else [model]
    whole = [unwrap(chunk) for chunk in chunks]
    config = whole[0].config
    stages = config.virtual_pipeline_model_parallel_size or 1
    if len(chunks) < stages:
        raise ValueError(
            f"{len(chunks)} of {stages} chunks of a virtual pipeline cannot be copied alone, since they share their FP8"
            " state: copy_model takes the list of all of this rank's"
        )
    if any(hasattr(param, "main_grad") for chunk in chunks for param in chunk.parameters()):
        raise ValueError(
            "a model in DistributedDataParallel cannot be copied: its weights lie in buffers. Copy it before, or build"
            " another one from a copy of the config and load its state_dict."
        )
    saved = fp8_state_dict(whole) if config.fp8 else None
    memo = {id(found): _instead(found) for found in _held(chunks)}
    copied: Any = copy.deepcopy(chunks, memo)
    for theirs, mine in zip(_parameters(chunks), _parameters(copied), strict=True):
        for name, value in vars(theirs).items():
            if isinstance(value, bool | int | float | str):  # not its master, nor its gradient's buffer
                vars(mine).setdefault(name, value)
    if saved is not None:
        _take_over(whole, [unwrap(chunk) for chunk in copied], saved)
    found: T = copied if isinstance(model, list) else copied[0]
    return found


def _parameters(chunks: list[torch.nn.Module]) -> list[torch.nn.Parameter]:
    return [param for chunk in chunks for param in chunk.parameters()]


def _instead(held: Any) -> Any:
    """What a copy has in the place of what cannot be copied."""
    return held.detach().clone() if isinstance(held, torch.Tensor) else held


def _held(chunks: list[torch.nn.Module]) -> Iterator[Any]:
    """Process groups, and results of computations that have a gradient's graph, wherever a model's modules keep them."""
    seen: set[int] = set()
    waiting: list[Any] = [*chunks]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, type | ModuleType):  # a module leads to all others
            continue
        seen.add(id(value))
        if isinstance(value, dist.ProcessGroup):
            yield value
        elif isinstance(value, torch.Tensor):
            if value.grad_fn is not None:
                yield value
        elif isinstance(value, dict):
            waiting += dict.values(value)  # of one that loads what it is asked for, what it has
        elif isinstance(value, list | tuple | set):
            waiting += value
        elif not callable(value) or isinstance(value, torch.nn.Module):
            waiting.append(getattr(value, "__dict__", {}))


def _take_over(chunks: list[Any], copied: list[Any], saved: dict[str, torch.Tensor]) -> None:
    """Give the copies their sites, and what the model remembers."""
    before, after = runtime_of(chunks[0].config), runtime_of(copied[0].config)
    assert before is not after, "a copy has FP8 state of its own"
    prepare(copied)
    load_fp8_state_dict(copied, saved)
    for linear in fp8_linears(copied):
        if isinstance(linear.weight, Fp8Parameter):
            quantizer = linear.fp8_site.quantizers["weight"]
            prepared = isinstance(linear.weight.quantizer, FittedQuantizer)
            linear.weight.quantised_by(replaced_by(quantizer) if prepared else quantizer)
    for theirs, mine in zip(chunks, copied, strict=True):
        if theirs in before.fp8_params:
            after.fp8_params.add(mine)
