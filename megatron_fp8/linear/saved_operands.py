"""Saves a forward's operands for its backward, and checks what saved-tensor hooks give back.

Between what forward saves and what backward gets back stand hooks (torch.autograd.graph.saved_tensors_hooks:
offloading, recomputation, compression, a user's own), and autograd looks at nothing that they give. Codes may come back
as another tensor that lies otherwise; of another shape C would read past its end, of another dtype other numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..numerics.rule import Granularity
from ..tensor import Operand, QuantizedSide

Facts = tuple[torch.Size, torch.dtype, torch.device] | None
"""Shape, dtype and device that a saved tensor must have when it comes back; None of None."""


def save(ctx: Any, tensors: Sequence[torch.Tensor | None]) -> None:
    """``ctx.save_for_backward`` of tensors that ``given_back`` will check."""
    ctx.saved_facts = facts_of(tensors)
    ctx.save_for_backward(*tensors)


def given_back(ctx: Any, name: str) -> list[Any]:
    """What ``save`` has saved, as ``check_given_back`` lets it pass."""
    tensors = list(ctx.saved_tensors)
    check_given_back(name, tensors, ctx.saved_facts)
    return tensors


def facts_of(tensors: Iterable[torch.Tensor | None]) -> tuple[Facts, ...]:
    """The facts of each tensor that is saved for backward."""
    return tuple(_facts(tensor) for tensor in tensors)


def check_given_back(name: str, tensors: Iterable[torch.Tensor | None], facts: Sequence[Facts]) -> None:
    """Raise ValueError in a layer's name unless the tensors have the facts that they had when they were saved.

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


AGAIN = "again"
"""SavedOperand of a weight: itself and its stamp, from which ``columnwise_of`` makes the operand."""


Spec = tuple[Granularity, bool, bool, bool, int] | str | None
"""An operand without its tensors."""


class SavedOperand(NamedTuple):
    """An operand taken apart into tensors for save_for_backward and the facts that put it together again."""

    tensors: tuple[torch.Tensor, ...]
    spec: Spec

    @staticmethod
    def of(operand: Operand | None) -> SavedOperand:
        if operand is None:
            return SavedOperand((), None)
        if isinstance(operand, QuantizedSide):
            return SavedOperand(
                (operand.codes, operand.scale_inv),
                (operand.granularity, operand.pow2, operand.finite, operand.tiled, operand.padding),
            )
        return SavedOperand((operand,), "plain")

    @staticmethod
    def restore(spec: Spec, tensors: list[torch.Tensor]) -> Operand | None:
        """The operand again; takes its tensors off the front of the list."""
        if spec is None:
            return None
        if isinstance(spec, str):
            return tensors.pop(0)
        codes, scale_inv = tensors.pop(0), tensors.pop(0)
        return QuantizedSide(codes, scale_inv, *spec)
