"""A small model, and faults planted in it: of precision, in one site, and of the model itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron_fp8.nn import convert_to_fp8, fp8_step
from megatron_fp8.recipe import Recipe

WIDTH, CLASSES = 32, 24


class Residual(nn.Module):
    """A pre-norm block with two linears."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, width] -> the same."""
        return x + self.dropout(self.fc2(nn.functional.gelu(self.fc1(self.norm(x)))))


class Tower(nn.Module):
    """Embedding, residual blocks, head; a batch norm has buffers that a forward changes."""

    def __init__(self, blocks: int):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Residual(WIDTH) for _ in range(blocks))
        self.norm, self.lm_head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] -> [tokens, CLASSES]."""
        self.calls += 1
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of predicting three times the token."""
    return nn.functional.cross_entropy(model(tokens).float(), (3 * tokens + 1) % CLASSES)


def batches(seed: int, count: int = 4, tokens: int = 48) -> list[torch.Tensor]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randint(0, CLASSES, (tokens,), generator=generator) for _ in range(count)]


def trained(
    seed: int, recipe: Recipe | str = "tensorwise", blocks: int = 2, *, lr: float = 1e-3, steps: int = 3
) -> tuple[Any, torch.optim.Optimizer]:
    """The model in BF16 after a few steps in FP8, and its optimizer."""
    torch.manual_seed(seed)
    model: Any = convert_to_fp8(Tower(blocks).to(torch.bfloat16), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    for batch in batches(seed + 1, steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        fp8_step(model)
        optimizer.step()
    return model, optimizer


def sites(model: Any) -> list[str]:
    """Names of the layers in FP8."""
    return [name for name, module in model.named_modules() if hasattr(type(module), "fp8_site")]


@contextmanager
def wrong_scale(model: Any, name: str, gemm: str, factor: float) -> Iterator[None]:
    """Inside, one GEMM of one site gives a multiple of what it should."""
    site = model.get_submodule(name).fp8_site
    make_wrong(site, gemm, factor)
    try:
        yield
    finally:
        del site.multiply, site.accumulate


def make_wrong(site: Any, gemm: str, factor: float) -> None:
    """From now on a GEMM of a site gives a multiple of what it should, also where it is added to a gradient."""
    right: Callable[..., torch.Tensor] = site.multiply

    def wrong(which: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = right(which, *args, **kwargs)
        return y * factor if which == gemm else y

    def added(which: str, a: Any, b: Any, into: torch.Tensor, **kwargs: Any) -> None:
        into.add_(wrong(which, a, b, torch.float32, **kwargs))

    site.multiply, site.accumulate = wrong, added


def stick_scale(model: Any, name: str, role: str, factor: float) -> None:
    """A delayed scale that is far from what its tensor needs."""
    slot = model.get_submodule(name).fp8_site.quantizers[role].slot
    slot.arena.scale[slot.index] *= factor


def grow_channel(model: Any, block: int, factor: float) -> None:
    """One channel of a block's first input is ``factor`` times the others; its weights are as much smaller."""
    chosen = model.blocks[block]
    with torch.no_grad():
        chosen.norm.weight[5] *= factor
        chosen.norm.bias[5] = 0
        chosen.fc1.weight[:, 5] /= factor


class _OneHugeRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        dy = dy.clone()
        dy[:, 0] = dy[:, 0] * ctx.factor
        return dy, None


def huge_gradient_channel(model: Any, name: str, factor: float) -> None:
    """One channel of a layer's output, which does not depend on its input, has a gradient so large that all others
    underflow in its codes."""
    layer = model.get_submodule(name)
    with torch.no_grad():
        layer.weight[0] = 0
    layer.register_forward_hook(lambda module, args, y: _OneHugeRow.apply(y, factor))


def draw(seed: int, model: Any) -> tuple[str, str]:
    """A site, and a GEMM whose result something depends on."""
    chosen = random.Random(seed)
    return chosen.choice(sites(model)), chosen.choice(["fprop", "dgrad", "wgrad"])
