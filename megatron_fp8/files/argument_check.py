"""Checks of models, optimizers and tensors that users pass to a function."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.optim import Optimizer


def check_model(model: Any) -> None:
    """Raise ValueError unless ``model`` is a torch.nn.Module."""
    if isinstance(model, torch.nn.Module):
        return
    what = f"a model is needed, a torch.nn.Module, and this is {_description(model)}"
    if isinstance(model, (str, os.PathLike)):
        what += ": load it first, as AutoModelForCausalLM.from_pretrained(path) does"
    elif isinstance(model, Optimizer):
        what += ": are model and optimizer exchanged?"
    elif isinstance(model, type):
        what += ": call it, which makes a model"
    raise ValueError(what)


def check_tensor(call: str, x: Any) -> None:
    """Raise TypeError, as torch's layers do, unless ``x`` is a torch.Tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{call}: a torch.Tensor is needed, and this is {_description(x)}")


def check_optimizer(optimizer: Any, model: torch.nn.Module) -> None:
    """Raise ValueError if an optimizer of torch, or a wrapper derived from it, has no parameter of the model.

    Other optimizers (DeepSpeed's, Megatron-Core's) step copies of the parameters, and are not checked.
    """
    while isinstance(optimizer, Optimizer) and "_optimizer_step_post_hooks" not in vars(optimizer):
        optimizer = getattr(optimizer, "optimizer", None)  # accelerate's wrapper
    if not isinstance(optimizer, Optimizer):
        return
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            f"{type(optimizer).__name__} has no parameter of this {type(model).__name__}: it is another model's, or was"
            " made before the parameters were replaced (fully_shard, to_empty): make it from model.parameters() now"
        )


def _description(value: Any) -> str:
    return (
        repr(value) if value is None or isinstance(value, (str, os.PathLike, type)) else type(value).__name__
    )
