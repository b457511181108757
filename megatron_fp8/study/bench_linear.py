"""Benchmarks of FP8 against BF16: quantization, GEMMs, a linear, layers and models.

Results are checked before timing: codes against the quantized values, products against the float64 product of
the same codes, a linear's output and gradients against BF16's. A wrong result is never timed. Contenders run
alternately, and ratios are taken per pair of runs.

For a layer, a training step and inference, a shape K x N x tokens gives the hidden size K and the feed-forward size N
of a Llama-like layer: heads of 64 (one head if 64 does not divide K), RMSNorm and SwiGLU.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
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
from ..inference import prepare_for_inference
from ..linear.function import fp8_linear
from ..linear.gemm_site import GemmSite
from ..nn import Fp8Config, convert_to_fp8, fp8_step
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


_FAR = 0.25
"""Relative root mean square difference from BF16, for several consecutive linears in E4M3 and E5M2."""
_VOCAB, _DEPTH = 512, 2


class Layer(nn.Module):
    """x [tokens, K] -> the same shape; BF16 weights, normal with standard deviation 1/sqrt(inputs)."""

    def __init__(self, hidden: int, ffn: int, device: torch.device) -> None:
        super().__init__()
        new = partial(nn.Linear, bias=False, device=device, dtype=torch.bfloat16)
        self.heads = hidden // 64 if hidden % 64 == 0 else 1
        self.qkv, self.out = new(hidden, 3 * hidden), new(hidden, hidden)
        self.gate_up, self.down = new(hidden, 2 * ffn), new(ffn, hidden)
        generator = torch.Generator(device).manual_seed(4)
        for part in (self.qkv, self.out, self.gate_up, self.down):
            nn.init.normal_(part.weight, std=part.in_features**-0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Attention over all tokens as one sequence, then the MLP, each with its residual."""
        tokens, hidden = x.shape
        q, k, v = self.qkv(_norm(x)).view(tokens, 3, self.heads, hidden // self.heads).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = x + self.out(attended.transpose(0, 1).reshape(tokens, hidden))
        gate, up = self.gate_up(_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """Token ids [tokens] -> logits [tokens, vocabulary]: embedding, layers, head."""

    def __init__(self, hidden: int, ffn: int, device: torch.device) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCAB, hidden, device=device, dtype=torch.bfloat16)
        self.layers = nn.Sequential(*(Layer(hidden, ffn, device) for _ in range(_DEPTH)))
        self.lm_head = nn.Linear(hidden, _VOCAB, bias=False, device=device, dtype=torch.bfloat16)
        generator = torch.Generator(device).manual_seed(5)
        for weight in (self.embedding.weight, self.lm_head.weight):
            nn.init.normal_(weight, std=hidden**-0.5, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        """The embedding and the head stay in BF16, as after a conversion."""
        return self.lm_head(_norm(self.layers(self.embedding(ids))))


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def convert_copy(model: nn.Module, recipe: Recipe, backend: ModuleType) -> nn.Module:
    """A copy of the model with FP8 linears; suppresses the conversion's table."""
    with contextlib.redirect_stdout(io.StringIO()):
        return convert_to_fp8(copy.deepcopy(model), Fp8Config(recipe=recipe, backend=backend.name))


def layer(bench: Bench, shape: Gemm, recipe: Recipe, backend: ModuleType) -> None:
    """Times forward and backward of one layer, including quantization of its weights."""
    bf16 = Layer(shape.k, shape.n, bench.device)
    fp8 = convert_copy(bf16, recipe, backend)
    x, dy = (bench.matrix(shape.tokens, shape.k, seed=seed) for seed in (1, 3))

    def run(model: nn.Module, ends: bool) -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        y = model(leaf)
        gradients = torch.autograd.grad(y, (leaf, *model.parameters()), dy)
        if ends:
            fp8_step(model)
        return y.detach(), gradients[0]

    exact = run(bf16, False)
    run(fp8, True)  # computes the scales of delayed scaling
    if bench.gate(f"layer {shape} {recipe_name(recipe)}", run(fp8, True), exact, _FAR):
        bench.time("layer", shape, recipe_name(recipe), partial(run, fp8, True), partial(run, bf16, False))


def step(bench: Bench, shape: Gemm, recipe: Recipe, backend: ModuleType) -> None:
    """Times a training step of a two-layer model: forward, backward, AdamW, the end of the FP8 iteration."""
    bf16 = Model(shape.k, shape.n, bench.device)
    fp8 = convert_copy(bf16, recipe, backend)
    generator = torch.Generator(bench.device).manual_seed(6)
    ids = torch.randint(
        _VOCAB, (shape.tokens + 1,), generator=generator, dtype=torch.int64, device=bench.device
    )

    def stepper(model: nn.Module, ends: bool) -> Callable[[], Tensor]:
        # Small enough to leave the loss, which is checked before timing, unchanged.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)

        def run() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids[:-1]).float(), ids[1:])
            loss.backward()
            optimizer.step()
            if ends:
                fp8_step(model)
            return loss.detach()

        return run

    runs = stepper(bf16, False), stepper(fp8, True)
    exact = runs[0]()
    runs[1]()
    if bench.gate(f"step {shape} {recipe_name(recipe)}", (runs[1](),), (exact,), 0.05):
        bench.time("step", shape, recipe_name(recipe), runs[1], runs[0])


def inference(bench: Bench, shape: Gemm, recipe: Recipe, backend: ModuleType) -> None:
    """Times the forward of one layer with weights prepared for inference."""
    bf16 = Layer(shape.k, shape.n, bench.device)
    fp8 = convert_copy(bf16, recipe, backend)
    x = bench.matrix(shape.tokens, shape.k, seed=1)
    leaf = x.detach().requires_grad_()
    fp8(leaf).float().sum().backward()  # fills the history of delayed scaling
    fp8_step(fp8)
    prepare_for_inference(fp8)

    @torch.no_grad()
    def run(model: nn.Module) -> Tensor:
        return model(x)

    if bench.gate(f"inference {shape} {recipe_name(recipe)}", (run(fp8),), (run(bf16),), _FAR):
        bench.time("inference", shape, recipe_name(recipe), partial(run, fp8), partial(run, bf16))


SECTIONS: dict[str, Callable[[Bench, Gemm, Recipe, ModuleType], None]] = {
    "quantise": quantize,
    "gemm": gemm,
    "linear": linear,
    "layer": layer,
    "step": step,
    "inference": inference,
}
"""The sections of a benchmark by name, in order of measurement."""
