"""Expert choices of one forward, recorded and replayed in another.

Megatron-Core's RouterReplay does both, layer by layer. It is attached to the routers of one model inside a context, so
the model need not be built with `moe_enable_routing_replay`, and other models are not affected. A replayed token's
experts are the recorded ones; their weights are computed from the current scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from .runtime import unwrap


def routers_of(model: Any) -> list[TopKRouter]:
    """The model's routers, layer by layer."""
    return [module for module in unwrap(model).modules() if isinstance(module, TopKRouter)]


@contextmanager
def record_routing(model: Any) -> Iterator[list[torch.Tensor]]:
    """Context of one forward. Yields a list, filled at its end: each router's choices, int64 [tokens, topk].

    Raises ValueError for a router that does not choose by Megatron-Core's top-k function.
    """
    found: list[torch.Tensor] = []
    with _attach(model, RouterReplayAction.RECORD) as replays:
        yield found
        for replay in replays:
            choices = replay.get_recorded_indices()
            if choices is None:
                raise ValueError(
                    "a router's choices cannot be recorded: set model.moe_router_fusion=False, and a"
                    " moe_router_load_balancing_type other than sinkhorn."
                )
            found.append(choices)


@contextmanager
def replay_routing(model: Any, choices: Sequence[torch.Tensor]) -> Iterator[None]:
    """Context of a forward without backward: tokens go to these experts, each router's int64 [tokens, topk]."""
    with _attach(model, RouterReplayAction.REPLAY_FORWARD) as replays:
        for replay, of_router in zip(replays, choices, strict=True):
            replay.set_target_indices(of_router)
        yield


@contextmanager
def _attach(model: Any, action: RouterReplayAction) -> Iterator[list[RouterReplay]]:
    routers = routers_of(model)
    before = [router.router_replay for router in routers]
    replays = [RouterReplay() for _ in routers]
    for replay in replays:  # Megatron-Core's list is of all models, and outlives them
        RouterReplay.global_router_replay_instances.remove(replay)
    try:
        for router, replay in zip(routers, replays, strict=True):
            replay.set_router_replay_action(action)
            router.router_replay = replay
        yield replays
    finally:
        for router, earlier in zip(routers, before, strict=True):
            router.router_replay = earlier


@contextmanager
def router_logits_in(model: Any, dtype: str | None) -> Iterator[None]:
    """Context in which router logits are computed in a dtype, as `moe_router_dtype` (None: the model's), and scores in
    float32."""
    routers = routers_of(model)
    before = [router.config.moe_router_dtype for router in routers]
    try:
        for router in routers:
            router.config.moe_router_dtype = dtype
            router.gating = partial(_wide_logits, router.gating)
        yield
    finally:
        for router, earlier in zip(routers, before, strict=True):
            router.config.moe_router_dtype = earlier
            del router.gating


def _wide_logits(gating: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return gating(x).float()


def count_changed_choices(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> int:
    """Number of (token, layer) whose sets of experts differ. Each: every router's choices, int64 [tokens, topk]."""
    return sum(
        int((a.sort(1).values != b.sort(1).values).any(1).sum()) for a, b in zip(ours, theirs, strict=True)
    )
