"""Copies a model: for moving averages, and for the reference model of a preference loss.

``copy.deepcopy`` of a Megatron-Core model raises TypeError, in BF16 too: its modules hold process groups, and expert
dispatchers hold results of the last forward. Here copies share the groups and clone those results. A copy has its own
FP8 state, which starts with the model's histories, iteration and guard moves.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..fp8_utils import quantizes
from ..linear.weight_cache import EvalWeightQuantizer, untrained_quantizer
from ..params.fp8_parameter import Fp8Parameter
from .checkpoint.state_dict import fp8_state_dict, load_fp8_state_dict
from .runtime import runtime_of, unwrap
from .sites import fp8_linears, prepare

T = TypeVar("T", torch.nn.Module, list[torch.nn.Module])


def copy_model(model: T) -> T:
    """Returns a copy of a model in the same layout, with its own memory. Call it between two iterations.

    Args:
        model: a GPTModel or Float16Module, not in DistributedDataParallel, whose buffers belong to an optimizer. For
            a virtual pipeline: the list of this rank's chunks, which share their FP8 state.

    The copy's parameters have no gradients, but the flags that Megatron-Core sets on parameters
    (tensor_model_parallel, ...). Collective with FP8.

    Raises ValueError for a model in DistributedDataParallel, for one chunk of several, or if FP8 cannot run as the
    config asks.
    """
    chunks: list[Any] = model if isinstance(model, list) else [model]
    whole = [unwrap(chunk) for chunk in chunks]
    config = whole[0].config
    stages = config.virtual_pipeline_model_parallel_size or 1
    if len(chunks) < stages:
        raise ValueError(
            f"{len(chunks)} of {stages} chunks of a virtual pipeline cannot be copied alone, since they share their FP8"
            " state: give copy_model the list of all chunks of this rank"
        )
    if any(hasattr(param, "main_grad") for chunk in chunks for param in chunk.parameters()):
        raise ValueError(
            "a model in DistributedDataParallel cannot be copied: its weights lie in buffers. Copy it before, or build"
            " another one from a copy of the config and load its state_dict."
        )
    saved = fp8_state_dict(whole) if quantizes(config) else None
    memo = {id(value): _replacement(value) for value in _uncopyable(chunks)}
    copied: Any = copy.deepcopy(chunks, memo)
    for original, duplicate in zip(_parameters(chunks), _parameters(copied), strict=True):
        for name, value in vars(original).items():
            if isinstance(value, bool | int | float | str):  # flags, no master, no buffer
                vars(duplicate).setdefault(name, value)
    if saved is not None:
        _transfer_state(whole, [unwrap(chunk) for chunk in copied], saved)
    result: T = copied if isinstance(model, list) else copied[0]
    return result


def _parameters(chunks: list[torch.nn.Module]) -> list[torch.nn.Parameter]:
    return [param for chunk in chunks for param in chunk.parameters()]


def _replacement(value: Any) -> Any:
    """Returns a copied tensor's clone; a process group itself, since groups are shared."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _uncopyable(chunks: list[torch.nn.Module]) -> Iterator[Any]:
    """Yields the process groups and the tensors with a grad_fn that the model's modules refer to."""
    seen: set[int] = set()
    pending: list[Any] = [*chunks]
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, type | ModuleType):  # a Python module refers to everything
            continue
        seen.add(id(value))
        if isinstance(value, dist.ProcessGroup):
            yield value
        elif isinstance(value, torch.Tensor):
            if value.grad_fn is not None:
                yield value
        elif isinstance(value, dict):
            pending += dict.values(value)  # a lazy dict loads on lookup: read only the values it has
        elif isinstance(value, list | tuple | set):
            pending += value
        elif not callable(value) or isinstance(value, torch.nn.Module):
            pending.append(getattr(value, "__dict__", {}))


def _transfer_state(chunks: list[Any], copied: list[Any], saved: dict[str, torch.Tensor]) -> None:
    """Gives the copies their sites, their FP8 state and their FP8 parameters' quantizers."""
    before, after = runtime_of(chunks[0].config), runtime_of(copied[0].config)
    assert before is not after, "a copy has FP8 state of its own"
    prepare(copied)
    load_fp8_state_dict(copied, saved)
    for linear in fp8_linears(copied):
        if isinstance(linear.weight, Fp8Parameter):
            quantizer = linear.fp8_site.quantizers["weight"]
            prepared = isinstance(linear.weight.quantizer, EvalWeightQuantizer)
            linear.weight.quantized_by(untrained_quantizer(quantizer) if prepared else quantizer)
    for original, duplicate in zip(chunks, copied, strict=True):
        if original in before.fp8_params:
            after.fp8_params.add(duplicate)
