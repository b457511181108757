"""A small converted model, and a training of it, for tests of the end of an iteration."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.nn import convert_to_fp8, fp8_state_dict, fp8_step
from megatron_fp8.recipe import DelayedScaling

DELAYED = DelayedScaling(amax_history_len=3)
ROUTES = ["eager", "compiled", "reentrant", "non-reentrant"]
"""Ways to call a model (``called``)."""


class Tower(nn.Module):
    def __init__(self, seed: int = 0, checkpointed: bool | None = None):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.checkpointed = checkpointed

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.checkpointed)


def batch(seed: int, rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, hook: bool = False
) -> list[float]:
    losses = []
    for step in steps:
        loss = model(batch(step)).square().mean()
        loss.backward()
        if not hook:
            fp8_step(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_bytes(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**fp8_state_dict(model), **model.state_dict()}


def assert_same_state(mine: nn.Module, other: nn.Module) -> None:
    ours, theirs = state_bytes(mine), state_bytes(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert_same_bytes(ours[name], theirs[name], name)


def sgd(model: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def called(model: nn.Module, route: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model's forward, compiled or under one of torch's two ways of checkpointing."""
    if route == "eager":
        return model
    if route == "compiled":
        return torch.compile(model, backend="aot_eager")
    return lambda x: checkpoint(model, x, use_reentrant=route == "reentrant")


def tower(recipe: object, *, training: bool = True, seed: int = 0) -> Tower:
    model: Tower = convert_to_fp8(Tower(seed), recipe)
    return model.train(training)
