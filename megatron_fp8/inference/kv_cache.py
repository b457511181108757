"""Ranges of the keys and values that an FP8 KV cache would hold.

Measured where engines cache them: keys after their norm and rotation, both for all heads of a layer. Latent attention is
left out: engines cache its latents, which no module here receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

ROLES = ("key", "value")


class Counter(Protocol):
    """Collects values."""

    def add(self, x: torch.Tensor) -> None:
        """Counts the elements of x (any shape)."""


class Attention(NamedTuple):
    """One attention of Megatron-Core's: core, name in the whole model, (heads of keys on all ranks, a head's size)."""

    core: torch.nn.Module
    name: str
    shape: tuple[int, int]


def attentions(model: torch.nn.Module) -> list[Attention]:
    """The model's attentions with one projection to queries, keys and values, in module order."""
    found = []
    for module in model.modules():
        site = getattr(getattr(module, "linear_qkv", None), "fp8_site", None)
        core: Any = getattr(module, "core_attention", None)
        if site is not None and core is not None:
            config = core.config
            shape = config.num_query_groups or config.num_attention_heads, config.kv_channels
            found.append(Attention(core, f"{site.plan.name.rpartition('.')[0]}.core_attention", shape))
    return found


@contextmanager
def record_keys_and_values(seen: Mapping[str, Counter], of: list[Attention]) -> Iterator[None]:
    """Adds these attentions' keys and values to ``seen``, by '<name>.key' and '<name>.value'."""

    def watch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for index, role in enumerate(ROLES, 1):
            seen[f"{name}.{role}"].add(args[index] if len(args) > index else kwargs[role])

    hooks = [
        one.core.register_forward_pre_hook(
            lambda module, args, kwargs, name=one.name: watch(name, args, kwargs), with_kwargs=True
        )
        for one in of
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
