"""Models made sick: NaN and Inf put into weights, inputs or gradients, and what must not be changed by them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def masters(optimizer: Any) -> list[bytes]:
    """The float32 weights that this rank's optimizer holds; the model's own are gathered from them, perhaps later."""
    return [p.detach().numpy().tobytes() for group in optimizer.param_groups for p in group["params"]]


@contextmanager
def made_sick(chunk: Any, where: str, value: float) -> Iterator[None]:
    """`value` in one element of a weight, of the first layer's input or of the last layer's gradient; undone after."""
    from megatron_fp8.mcore.runtime import unwrap

    layers = unwrap(chunk).decoder.layers
    if where == "weights":
        weight = next(p.data for name, p in layers[0].named_parameters() if "linear_fc1" in name)
        kept = weight[3, 5].clone()
        weight[3, 5] = value
        yield
        weight[3, 5] = kept
        return

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(tensor)
        mask.view(-1)[7] = value
        return tensor + mask

    if where == "inputs":
        hook = layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "hidden_states": poison(kwargs["hidden_states"])}),
            with_kwargs=True,
        )
    else:
        hook = layers[-1].register_forward_hook(
            lambda _, args, output: output[0].register_hook(poison) and None
        )
    yield
    hook.remove()


OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
