"""Two linears side by side, treated alike: one whose calls are bound, and one whose calls never are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.linear.kinds import Kind, Kinds
from megatron_fp8.linear.site import GemmSite
from megatron_fp8.plan.site_plan import fp8_site
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.bound_casts import Machine
from tests.support.sites import RECIPES

BF16 = torch.bfloat16
NAMES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")


class Never(Kinds):
    """Of a site whose calls are never bound."""

    def of(self, key: Any) -> Kind:
        return Never.kind

    class _Kind(Kind):
        def to_be_noted(self) -> bool:
            return False

    kind = _Kind()


class Linear:
    """A site with its weight: one of two that are treated alike."""

    def __init__(self, recipe: str, *, binds: bool, bias: bool = False, keeps: bool = True, **options: Any):
        self.state = Fp8State(keeps_weights=keeps)
        plan = fp8_site("a", 0, RECIPES[recipe], "native", "test", **options)
        self.site = GemmSite(plan, self.state, None)
        if not binds:
            self.site.kinds = Never()
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.nn.Parameter(torch.randn(128, 256, generator=generator).to(BF16))
        self.bias = torch.nn.Parameter(torch.randn(128, generator=generator).to(BF16)) if bias else None
        self.options: dict[str, Any] = {}

    def __call__(self, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor | None]:
        """y, gradients, what slots have recorded and what was counted."""
        x = x.detach().requires_grad_(x.requires_grad)
        y = fp8_linear(x, self.weight, self.bias, self.site, **self.options)
        y.backward(dy)
        return [y, x.grad, *self.gradients(), *self.told()]

    def gradients(self) -> list[torch.Tensor | None]:
        found = [None if p is None else p.grad for p in (self.weight, self.bias)]
        self.weight.grad = None
        if self.bias is not None:
            self.bias.grad = None
        return [*found, getattr(self.weight, "main_grad", None)]

    def told(self) -> list[torch.Tensor]:
        counts = self.state.counts
        return [
            self.state.arenas[0].rows[:, :3].clone(),
            torch.tensor([counts.casts, counts.fp8_gemms, counts.hp_gemms]),
        ]


class Pair:
    """Both. ``bound`` says how often a forward or a backward ran bound in the last call."""

    def __init__(self, machine: Machine, recipe: str = "tensorwise", **options: Any):
        self.machine, self.bound = machine, 0
        self.both = [Linear(recipe, binds=binds, **options) for binds in (True, False)]

    def __call__(self, x: torch.Tensor, dy: torch.Tensor) -> int:
        return self.each(lambda linear: linear(x, dy))

    def each(self, work: Callable[[Linear], Any]) -> int:
        """Do it to both, and compare; how many casts of the first were bound."""
        before = self.machine.bound
        first = work(self.both[0])
        bound = self.machine.bound - before
        second = work(self.both[1])
        assert self.machine.bound - before == bound, "the second is never bound"
        for one, other in zip(first or [], second or [], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert_same_bytes(one.detach(), other.detach())
        return bound

    def bind(self, x: torch.Tensor, dy: torch.Tensor) -> None:
        """Call until nothing changes: forward and backward are bound."""
        found = [self(x, dy) for _ in range(7)]
        assert found[-1] == found[-2] >= 2 and found[0] == 0, found

    def bind_again(self, x: torch.Tensor, dy: torch.Tensor) -> None:
        """Call until a kind that may have been met is bound."""
        assert [self(x, dy) for _ in range(7)][-1] >= 2

    @property
    def site(self) -> GemmSite:
        return self.both[0].site


def x_and_dy(
    tokens: int = 128, seed: int = 0, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(tokens, size, generator=generator).to(dtype) for size in (256, 128))
    return x.requires_grad_(), dy


# -------------------------------------------------------------------------------------------------------- the same bits
