"""Benchmarks of a Llama-like layer, a training step and an inference forward.

In a shape K x N x tokens, K is the hidden size and N the feed-forward size. The layer has fused query, key
and value and fused gate and up projections, attention with heads of 64 (one head if 64 does not divide K),
RMSNorm and SwiGLU.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..inference import prepare_for_inference
from ..nn import Fp8Config, convert_to_fp8, fp8_step
from ..plan.gemm_size_table import Gemm
from ..recipe import Recipe, recipe_name
from .bench_linear import Bench, gemm, linear, quantize

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


def converted(model: nn.Module, recipe: Recipe, backend: ModuleType) -> nn.Module:
    """A copy of the model with FP8 linears; suppresses the conversion's table."""
    with contextlib.redirect_stdout(io.StringIO()):
        return convert_to_fp8(copy.deepcopy(model), Fp8Config(recipe=recipe, backend=backend.name))


def layer(bench: Bench, shape: Gemm, recipe: Recipe, backend: ModuleType) -> None:
    """Times forward and backward of one layer, including quantization of its weights."""
    bf16 = Layer(shape.k, shape.n, bench.device)
    fp8 = converted(bf16, recipe, backend)
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
    fp8 = converted(bf16, recipe, backend)
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
    fp8 = converted(bf16, recipe, backend)
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
