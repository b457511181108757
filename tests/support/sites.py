"""GEMM sites for tests: recipes by name, and a backend that keeps what it multiplied and quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_fp8 import Format
from megatron_fp8.backends import emulated
from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.plan.resolve import SiteRequest, resolve
from megatron_fp8.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from megatron_fp8.state.arena import Group
from megatron_fp8.state.fp8_state import Fp8State

HYBRID = Format.HYBRID
NATIVE_RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "tensorwise": Float8CurrentScaling(),
    "tensorwise-pow2": Float8CurrentScaling(use_power_2_scales=True),
    "rowwise": Float8RowwiseScaling(fp8_format=HYBRID),
    "blockwise": Float8BlockScaling(),
    "blockwise-fp32": Float8BlockScaling(fp8_format=HYBRID, use_f32_scales=True),
    "mxfp8": MXFP8BlockScaling(fp8_format=HYBRID),
}
"""Recipes that the native backend multiplies."""

RECIPES = NATIVE_RECIPES | {"nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True)}
"""Every recipe whose three roles are quantized."""


def _without(plain: str) -> CustomRecipe:
    return CustomRecipe(
        lambda role: None if role == plain else RECIPES["mxfp8" if role == "input" else "rowwise"]
    )


CUSTOM: dict[str, Recipe] = {f"no-{role}": _without(role) for role in ("input", "weight", "grad_output")}
"""Recipes that leave one role in high precision."""

ALL_RECIPES = RECIPES | CUSTOM


@dataclass
class Product:
    """One GEMM: its operands and its result."""

    a: Any
    b: Any
    out_dtype: torch.dtype
    result: torch.Tensor


@dataclass(eq=False)
class RecordingBackend:
    """The emulated backend; lists every product, and every matrix it quantized with the direction asked for."""

    products: list[Product] = field(default_factory=list)
    casts: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    on_gemm: Callable[[], None] = lambda: None

    def gemm(
        self, a: Any, b: Any, *, out_dtype: torch.dtype, bias: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        self.on_gemm()
        result = emulated.gemm(a, b, out_dtype=out_dtype, bias=bias, **options)
        self.products.append(Product(a, b, out_dtype, result))
        return result

    def quantize(self, x: torch.Tensor, rule: Any, direction: Any, **options: Any) -> Any:
        self.casts.append((tuple(x.shape), direction))
        return emulated.quantize(x, rule, direction, **options)


def make_site(
    recipe: Recipe | str,
    *,
    state: Fp8State | None = None,
    group: Group = None,
    name: str = "layers.0.linear",
    fp8_wgrad: bool = True,
    overrides: dict[str, str] | None = None,
    seed: int = 0,
    stream: int = 0,
    recording: bool = True,
) -> tuple[GemmSite, RecordingBackend]:
    """A site on the emulated backend, and what records there, unless nothing shall (``recording``).

    ``overrides`` may name recipes of ALL_RECIPES."""
    own = ALL_RECIPES[recipe] if isinstance(recipe, str) else recipe
    request = SiteRequest(
        own, ALL_RECIPES, reason="test", overrides=overrides or {}, fp8_wgrad=fp8_wgrad, backend="emulated"
    )
    plan = resolve(request, name, 0, torch.device("cpu"))
    site = GemmSite(plan, state or Fp8State(), group, seed=seed, stream=stream)
    backend = RecordingBackend()
    if not recording:
        return site, backend
    site.backend = backend  # type: ignore[assignment]
    for quantizer in site.quantizers.values():
        if quantizer is not None:
            quantizer.backend = backend  # type: ignore[assignment]
    return site, backend


def in_turn(x: Any, weights: Any, tokens: Any, sites: Any, **options: Any) -> torch.Tensor:
    """What grouped_linear has to equal: each expert's tokens by its own linear."""
    parts = zip(x.split(list(tokens)), weights, sites, strict=True)
    return torch.cat([fp8_linear(part, weight, None, site, **options) for part, weight, site in parts])


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers whose rows differ in size, so that a scale of the wrong row or block shows."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.exp2(torch.randint(-4, 5, (*shape[:-1], 1), generator=g).float())
    return (torch.randn(shape, generator=g) * rows).to(dtype)


@dataclass
class Outcome:
    y: torch.Tensor
    dx: torch.Tensor
    dw: torch.Tensor
    dbias: torch.Tensor | None


def run(
    site: GemmSite, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, bias: Any = None, **options
) -> Outcome:
    """One forward and backward of fresh leaves."""
    x, w, bias = (None if t is None else t.detach().clone().requires_grad_() for t in (x, w, bias))
    y = fp8_linear(x, w, bias, site, **options)
    y.backward(dy)
    assert x is not None and w is not None and x.grad is not None and w.grad is not None
    return Outcome(y.detach(), x.grad, w.grad, None if bias is None else bias.grad)


def data(
    m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """x [m, k], w [n, k], dy [m, n]."""
    sizes = [(m, k), (n, k), (m, n)]
    x, w, dy = (randn(*size, seed=seed + i, dtype=dtype) for i, size in enumerate(sizes))
    return x, w, dy
