"""Liger Kernel's cross entropy as a choice of Megatron-Core's fused loss.

Megatron-Core's `cross_entropy_loss_fusion` chooses by `cross_entropy_fusion_impl`: 'native' (its own torch functions), or
'te'. Here 'liger' is a third: linkedin's Triton kernels, one pass over the logits [s, b, v / tp] in their own dtype, with
Megatron-Core's formula over tensor-parallel ranks.

Liger's own patch of Megatron-Core rebinds the function in its module, which `LanguageModule` has imported before.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..patches.patching import PatchList

IMPLEMENTATIONS = ("native", "te", "liger")

patches = PatchList("megatron.core.models.common.language_module.language_module.LanguageModule")


def check_implementation(config: Any) -> None:
    """Raises ValueError unless the cross entropy that the config names can run here."""
    name = config.cross_entropy_fusion_impl
    if not config.cross_entropy_loss_fusion or name in ("native", "te"):
        return
    if name not in IMPLEMENTATIONS:
        reason = f"it must be one of {', '.join(map(repr, IMPLEMENTATIONS))}"
    elif not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
        reason = "its Triton kernels run on GPUs"
    else:
        reason = _why_no_liger() or ""
    if reason:
        raise ValueError(
            f"cross_entropy_fusion_impl={name!r}: {reason}. Set it to 'native', or cross_entropy_loss_fusion=False"
        )


def _why_no_liger() -> str | None:
    try:
        _liger()
    except (ImportError, AttributeError) as error:
        return f"pip install 'liger-kernel>=0.8.5' is needed ({error})"
    return None


@functools.cache
def _liger() -> Callable[..., Tensor]:
    """Returns Liger's loss: (logits [s, b, v / tp], labels [s, b], tp_group) -> float32 [s, b]."""
    loss: Callable[..., Tensor] = importlib.import_module("liger_kernel.megatron").LigerMegatronCrossEntropy()
    return loss


@patches.wrap("__init__", "a loss that cannot run would fail only after the first forward")
def check_before_building(
    original: Callable[..., None], self: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Checks the implementation, then constructs the model."""
    check_implementation(config)
    original(self, config, *args, **kwargs)


@patches.wrap(
    "compute_language_model_loss", "it knows 'native' and 'te' alone, and has no loss for another name"
)
def language_model_loss(original: Callable[..., Tensor], self: Any, labels: Tensor, logits: Tensor) -> Tensor:
    """Returns the loss of each token, [b, s], from labels [b, s] and logits [s, b, v / tp]."""
    if not (self.config.cross_entropy_loss_fusion and self.config.cross_entropy_fusion_impl == "liger"):
        return original(self, labels, logits)
    loss = _liger()(logits, labels.transpose(0, 1).contiguous(), self.pg_collection.tp)
    return loss.transpose(0, 1).contiguous()
