"""Patches for multi-token prediction: loss under context parallelism, an unused weight.

Its loss is the mean over the tokens of all ranks. Megatron-Core divides the sum of a rank's losses by the number of
tokens that the rank predicts, and takes the mean over ranks. The rank with the end of the sequence predicts fewer, so
its tokens have more weight, and gradients depend on the layout.

A last stage that predicts several tokens has the embedding's table. A tied output layer gets that table, and needs no
weight of its own; Megatron-Core makes one nevertheless, and then fails at the first save, which expects none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .patching import Patch


def patches() -> list[Patch]:
    """Returns patches for the function by which GPTModel shifts the loss mask, and for the tying of its output layer."""
    return [
        Patch(
            "megatron.core.models.gpt.gpt_model",
            "roll_tensor",
            count_of_all_ranks,
            "context parallel ranks predict different numbers of tokens, and each divides by its own",
            wrap=True,
        ),
        Patch(
            "megatron.core.models.common.language_module.language_module.LanguageModule",
            "setup_embeddings_and_output_layer",
            tied_without_a_weight,
            "a last stage that predicts several tokens cannot be saved with a weight of its tied output layer",
            wrap=True,
        ),
    ]


def count_of_all_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps roll_tensor: the sum of a mask becomes the mean over context parallel ranks, not this rank's."""

    @functools.wraps(original)
    def roll_tensor(tensor: torch.Tensor, *args: Any, cp_group: Any = None, **kwargs: Any) -> Any:
        rolled, count = original(tensor, *args, cp_group=cp_group, **kwargs)
        if cp_group is None or cp_group.size() == 1:
            return rolled, count
        dist.all_reduce(count, group=cp_group)
        return rolled, count / cp_group.size()

    return roll_tensor


def tied_without_a_weight(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wraps LanguageModule.setup_embeddings_and_output_layer: removes the weight of a tied output layer first."""

    @functools.wraps(original)
    def setup_embeddings_and_output_layer(self: Any) -> None:
        has_table = getattr(self, "mtp_process", False) and not self.pre_process
        if has_table and self.post_process and self.share_embeddings_and_output_weights:
            self.output_layer.weight = None
        original(self)

    return setup_embeddings_and_output_layer
