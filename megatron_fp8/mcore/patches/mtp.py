"""A patch for multi-token prediction under context parallelism: its loss is the mean over the tokens of all ranks.

Megatron-Core divides the sum of a rank's losses by the tokens that this rank predicts, and takes the mean over ranks. The
rank with the end of the sequence predicts fewer, so that its tokens weigh more, and gradients depend on the layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .patching import Patch


def patches() -> list[Patch]:
    """The function that GPTModel shifts the mask of the loss by."""
    return [
        Patch(
            "megatron.core.models.gpt.gpt_model",
            "roll_tensor",
            count_of_all_ranks,
            "context parallel ranks predict different numbers of tokens, and each divides by its own",
            wrap=True,
        )
    ]


def count_of_all_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """roll_tensor; of a mask the sum beside it is the mean over context parallel ranks, and not this rank's."""

    @functools.wraps(original)
    def roll_tensor(tensor: torch.Tensor, *args: Any, cp_group: Any = None, **kwargs: Any) -> Any:
        rolled, count = original(tensor, *args, cp_group=cp_group, **kwargs)
        if cp_group is None or cp_group.size() == 1:
            return rolled, count
        dist.all_reduce(count, group=cp_group)
        return rolled, count / cp_group.size()

    return roll_tensor
