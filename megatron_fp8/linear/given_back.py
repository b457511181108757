"""What backward gets back of what forward saved, looked at before C or a GPU's kernel reads it.

Between the two stand hooks (torch.autograd.graph.saved_tensors_hooks: offloading, recomputation, compression, a
user's own), and autograd looks at nothing that they give. Codes may come back as another tensor that lies otherwise. A
tensor of another shape would be read past its end, and one of another dtype as other numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

Facts = tuple[torch.Size, torch.dtype, torch.device] | None
"""What a tensor has to have again; of None nothing."""


def save(ctx: Any, tensors: Sequence[torch.Tensor | None]) -> None:
    """``ctx.save_for_backward`` of tensors that ``saved`` will check."""
    ctx.saved_facts = facts_of(tensors)
    ctx.save_for_backward(*tensors)


def saved(ctx: Any, name: str) -> list[Any]:
    """What ``save`` has saved, as ``check`` lets it pass."""
    tensors = list(ctx.saved_tensors)
    check(name, tensors, ctx.saved_facts)
    return tensors


def facts_of(tensors: Iterable[torch.Tensor | None]) -> tuple[Facts, ...]:
    """Those of tensors that are saved for backward."""
    return tuple(_facts(tensor) for tensor in tensors)


def check(name: str, tensors: Iterable[torch.Tensor | None], facts: Sequence[Facts]) -> None:
    """ValueError, in the name of a layer, unless these tensors can be those that had such facts when they were saved.

    Their values and strides are not looked at.
    """
    for tensor, wanted in zip(tensors, facts, strict=True):
        found = _facts(tensor)
        if found != wanted:
            raise ValueError(
                f"{name}: {_described(wanted)} was saved for backward, and {_described(found)} came back: an unpack hook"
                " of torch.autograd.graph.saved_tensors_hooks has to give back the same shape and dtype on the same"
                " device"
            )


def _facts(tensor: torch.Tensor | None) -> Facts:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def _described(facts: Facts) -> str:
    if facts is None:
        return "nothing"
    shape, dtype, device = facts
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"
