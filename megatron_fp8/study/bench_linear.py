"""Benchmarks of FP8 against BF16: quantization, GEMMs, a linear.

Results are checked before timing: codes against the quantized values, products against the float64 product of
the same codes, a linear's output and gradients against BF16's. A wrong result is never timed. Contenders run
alternately, and ratios are taken per pair of runs. Larger cells are in bench_models.py.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends.emulated import gemm as emulated_gemm
from ..linear.function import fp8_linear
from ..linear.gemm_site import GemmSite
from ..numerics.formats import E2M1
from ..plan.gemm_size_table import Gemm
from ..plan.site_plan import fp8_site
from ..plan.timing import LEAST_FOR_SPREAD, interleave_on
from ..recipe import Recipe, recipe_name
from ..state.fp8_state import Fp8State

# Bounds of relative root mean square errors. A gradient in E5M2 (2 mantissa bits) has an error of 0.07, E2M1 of 0.095,
# and 0.18 with linear and stochastic gradients: FP4's bounds are twice these.
_CODES, _PRODUCT, LINEAR_BOUND = 0.09, 0.01, 0.12


def _bound(recipe: Recipe, bound: float) -> float:
    in_fp4 = any(rule is not None and rule.fmt is E2M1 for rule in recipe.role_rules.values())
    return 2 * bound if in_fp4 else bound


@dataclass
class Bench:
    """Settings and results of a benchmark."""

    device: torch.device
    repetitions: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def matrix(self, *shape: int, seed: int) -> torch.Tensor:
        """A matrix of normal bfloat16 numbers."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)

    def gate(
        self, what: str, found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], bound: float
    ) -> bool:
        """Whether results are correct and may be timed; a wrong result fails the run."""
        error = max(relative_error(a, b) for a, b in zip(found, exact, strict=True))
        if error <= bound:
            return True
        self.fail(f"{what}: off by {error:.1e} of the values, at most {bound:g} is right")
        return False

    def fail(self, what: str) -> None:
        """Report a wrong result, which fails the run."""
        self.wrong.append(what)
        print(f"WRONG, not timed: {what}", file=sys.stderr, flush=True)

    def time(
        self, section: str, shape: Gemm, contender: str, run: Callable[[], Any], bf16: Callable[[], Any]
    ) -> None:
        """Time a contender against BF16 (quantization against a copy), in turn, and add its row."""
        times = interleave_on(self.device, {"bf16": bf16, "fp8": run}, self.repetitions)
        fp8 = times["fp8"]
        ratio, spread = fp8.ratio_to(times["bf16"])
        self.rows.append(
            {
                "section": section,
                **shape._asdict(),
                "contender": contender,
                "fp8_ms": fp8.median * 1e3,
                "bf16_ms": times["bf16"].median * 1e3,
                "ratio": ratio,
                "spread": spread if len(fp8.seconds) >= LEAST_FOR_SPREAD else None,
            }
        )


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference over that of the exact values; Inf if a value is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    size = exact.double().square().mean().sqrt()
    return float((found.double() - exact.double()).square().mean().sqrt() / size)


def quantize(bench: Bench, shape: Gemm, recipe: Recipe, backend: ModuleType) -> None:
    """Times quantization of a linear's input in both directions, against a copy in BF16."""
    rule = recipe.rule("input")
    if rule is None:
        return
    x = bench.matrix(shape.tokens, shape.k, seed=1)
    scale = torch.full((), 3.0, device=bench.device, dtype=torch.float32) if rule.delayed else None
    run = partial(backend.quantize, x, rule, "both", scale=scale)
    found = run().tensor
    assert found.columnwise is not None
    sides = (found.dequantize(), found.columnwise.dequantize().t())
    if bench.gate(f"quantise {shape} {recipe_name(recipe)}", sides, (x, x), _bound(recipe, _CODES)):
        bench.time("quantise", shape, recipe_name(recipe), run, partial(torch.empty_like(x).copy_, x))


def gemm(bench: Bench, shape: Gemm, recipe: Recipe, backend: ModuleType) -> None:
    """Times the forward GEMM of prepared codes, against BF16's."""
    rules = recipe.rule("input"), recipe.rule("weight")
    if rules[0] is None or rules[1] is None:
        return
    x, w = bench.matrix(shape.tokens, shape.k, seed=1), bench.matrix(shape.n, shape.k, seed=2)
    a, b = (
        backend.quantize(t, rule, "rowwise").tensor.rowwise for t, rule in zip((x, w), rules, strict=True)
    )
    run = partial(backend.gemm, a, b, out_dtype=torch.bfloat16, fast_accumulation=True)
    exact = emulated_gemm(a, b, out_dtype=torch.float64, exact=True)
    if bench.gate(f"gemm {shape} {recipe_name(recipe)}", (run(),), (exact,), _PRODUCT):
        bench.time("gemm", shape, recipe_name(recipe), run, partial(torch.matmul, x, w.t()))


def linear(bench: Bench, shape: Gemm, recipe: Recipe, backend: ModuleType) -> None:
    """Times fprop, dgrad and wgrad including quantization, against torch's linear in BF16."""
    weight = bench.matrix(shape.n, shape.k, seed=2).mul_(shape.k**-0.5).requires_grad_()
    x, dy = bench.matrix(shape.tokens, shape.k, seed=1), bench.matrix(shape.tokens, shape.n, seed=3)
    state = Fp8State(bench.device)
    site = GemmSite(fp8_site("bench", None, recipe, backend.name, "benchmark"), state, None)

    def step(forward: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaf = x.detach().requires_grad_()
        y = forward(leaf)
        return y.detach(), *torch.autograd.grad(y, (leaf, weight), dy)

    def fp8(leaf: torch.Tensor) -> torch.Tensor:
        return fp8_linear(leaf, weight, None, site, fresh_weight=True)

    def bf16(leaf: torch.Tensor) -> torch.Tensor:
        return F.linear(leaf, weight)

    exact = step(bf16)
    step(fp8)
    state.finish_iteration()  # computes the scales of delayed scaling
    if bench.gate(f"linear {shape} {recipe_name(recipe)}", step(fp8), exact, _bound(recipe, LINEAR_BOUND)):
        bench.time("linear", shape, recipe_name(recipe), partial(step, fp8), partial(step, bf16))


def torchao_missing() -> str | None:
    """Why torchao cannot be measured; None if it can."""
    return None if importlib.util.find_spec("torchao") else "torchao is not installed"


def torchao_linear(bench: Bench, shape: Gemm) -> None:
    """Times torchao's tensorwise linear, forward and backward; compiled on a GPU."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    weight = bench.matrix(shape.n, shape.k, seed=2).mul_(shape.k**-0.5)
    x, dy = bench.matrix(shape.tokens, shape.k, seed=1), bench.matrix(shape.tokens, shape.n, seed=3)
    holder = nn.Sequential(nn.Linear(shape.k, shape.n, bias=False, device="meta"))
    holder[0].weight = nn.Parameter(weight)
    plain = nn.Linear(shape.k, shape.n, bias=False, device="meta")
    plain.weight = nn.Parameter(weight.clone())
    convert_to_float8_training(holder, config=Float8LinearConfig(emulate=bench.device.type == "cpu"))
    peer: nn.Module = torch.compile(holder) if bench.device.type == "cuda" else holder  # type: ignore[assignment]

    def run(model: nn.Module) -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        y = model(leaf)
        return y.detach(), *torch.autograd.grad(y, (leaf, *model.parameters()), dy)

    if bench.gate(f"linear {shape} torchao tensorwise", run(peer), run(plain), LINEAR_BOUND):
        bench.time("linear", shape, "torchao tensorwise", partial(run, peer), partial(run, plain))
