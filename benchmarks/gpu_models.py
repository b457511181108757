"""The models that the GPU check and benchmark run: a Llama-like layer around any linear, and Megatron-Core's GPT.

The layer is the same code for all contenders (torch's linears, torchao's, Transformer Engine's, this package's), with the
same weights, so that only the linears differ. Norm, rotation and SwiGLU are compiled where a compiler is, for all alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.plan.site_plan import fp8_site
from megatron_fp8.recipe import Recipe
from megatron_fp8.state.fp8_state import Fp8State

HEAD = 128


class Fp8BenchLinear(nn.Module):
    """A linear of this package, without Megatron: y = x weight^T in FP8 as a recipe has it."""

    def __init__(self, weight: nn.Parameter, recipe: Recipe, backend: str, name: str, state: Fp8State):
        super().__init__()
        self.weight = weight
        self.site = GemmSite(fp8_site(name, 0, recipe, backend, "benchmark"), state, None)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]; the weight is quantized anew, as after an optimizer step."""
        return fp8_linear(x, self.weight, None, self.site, fresh_weight=True)


def plain_linear(weight: nn.Parameter, name: str = "") -> nn.Linear:
    """torch's linear around this very parameter."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = weight
    return linear


@dataclass(frozen=True)
class Sizes:
    """A Llama-like layer: grouped queries in eights, gated MLP."""

    hidden: int
    ffn: int
    tokens: int
    sequence: int
    fused: bool = True

    @property
    def groups(self) -> int:
        """Key and value heads."""
        return max(1, self.hidden // HEAD // 4 if self.hidden < 8192 else 8)

    def weights(self) -> dict[str, tuple[int, int]]:
        """[N, K] of every linear."""
        h, kv = self.hidden, self.groups * HEAD
        if self.fused:
            return {"qkv": (h + 2 * kv, h), "proj": (h, h), "fc1": (2 * self.ffn, h), "fc2": (h, self.ffn)}
        return {
            "q": (h, h),
            "k": (kv, h),
            "v": (kv, h),
            "proj": (h, h),
            "gate": (self.ffn, h),
            "up": (self.ffn, h),
            "fc2": (h, self.ffn),
        }

    @property
    def linear_flops(self) -> int:
        """Of all linears, forward and backward."""
        return 6 * self.tokens * sum(n * k for n, k in self.weights().values())


LAYERS = {4096: Sizes(4096, 14336, 8192, 4096), 8192: Sizes(8192, 28672, 8192, 4096)}
DRY_LAYER = Sizes(256, 384, 64, 32)


def make_weights(sizes: Sizes, device: torch.device) -> dict[str, nn.Parameter]:
    """bfloat16 weights of one layer; the fused projections hold the separate ones' shapes one below the other."""
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: nn.Parameter(
            torch.randn(n, k, generator=generator, device=device, dtype=torch.float32)
            .mul_(k**-0.5)
            .to(torch.bfloat16)
        )
        for name, (n, k) in sizes.weights().items()
    }


def rms_norm(x: Tensor) -> Tensor:
    """x / rms(x), in float32 inside."""
    return F.rms_norm(x.float(), x.shape[-1:]).to(x.dtype)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of [gate, up]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x [tokens, heads, d], cos and sin [tokens, 1, d]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x * cos + turned * sin).to(x.dtype)


class Layer(nn.Module):
    """Norm, attention, norm, SwiGLU MLP, with residuals. ``make`` wraps each weight into a linear.

    ``small`` compiles the element-wise functions (torch.compile, or the identity).
    """

    def __init__(
        self, sizes: Sizes, weights: dict[str, nn.Parameter], make: Callable[..., nn.Module], small: Any
    ):
        super().__init__()
        self.sizes = sizes
        self.linears = nn.ModuleDict({name: make(weight, name=name) for name, weight in weights.items()})
        self.norm, self.swiglu, self.rotate = small(rms_norm), small(swiglu), small(rotate)
        device = next(iter(weights.values())).device
        position = torch.arange(sizes.sequence, device=device, dtype=torch.float32)
        frequency = 10000.0 ** (-torch.arange(0, HEAD, 2, device=device, dtype=torch.float32) / HEAD)
        angle = (position[:, None] * frequency).repeat(sizes.tokens // sizes.sequence, 2)[:, None]
        self.register_buffer("cos", angle.cos().to(torch.bfloat16))
        self.register_buffer("sin", angle.sin().to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> the same shape."""
        x = x + self.linears["proj"](self._attention(self.norm(x)))
        y = self.norm(x)
        if self.sizes.fused:
            both = self.linears["fc1"](y)
        else:
            both = torch.cat([self.linears["gate"](y), self.linears["up"](y)], -1)
        return x + self.linears["fc2"](self.swiglu(both))

    def _attention(self, x: Tensor) -> Tensor:
        s, kv = self.sizes, self.sizes.groups * HEAD
        if s.fused:
            q, k, v = self.linears["qkv"](x).split([s.hidden, kv, kv], -1)
        else:
            q, k, v = (self.linears[name](x) for name in "qkv")
        q, k, v = (t.unflatten(-1, (-1, HEAD)) for t in (q, k, v))
        q, k = self.rotate(q, self.cos, self.sin), self.rotate(k, self.cos, self.sin)
        q, k, v = (t.unflatten(0, (-1, s.sequence)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)


def our_layer(
    sizes: Sizes, weights: dict[str, nn.Parameter], recipe: Recipe, backend: str, small: Any
) -> Layer:
    """The layer with this package's linears; ``layer.fp8_state`` is to be finished after each iteration."""
    state = Fp8State(next(iter(weights.values())).device)
    layer = Layer(sizes, weights, partial(Fp8BenchLinear, recipe=recipe, backend=backend, state=state), small)
    layer.fp8_state = state  # type: ignore[assignment]
    return layer


# ------------------------------------------------------------------------------------------------- Megatron-Core


@dataclass(frozen=True)
class Gpt:
    """Sizes of a Llama-like GPT; with experts, each token goes to two, whose products are made in one call."""

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocabulary: int
    batch: int
    sequence: int
    experts: int = 0


DENSE_182M = Gpt(12, 768, 12, 4, 4096, 32768, 8, 2048)
TINY = Gpt(2, 256, 4, 2, 512, 512, 4, 256)
DRY = Gpt(1, 64, 2, 1, 128, 128, 2, 32)
EXPERTS = {
    "moe_grouped_gemm": True,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}


class Training:
    """Megatron-Core's GPT with its DistributedDataParallel and Adam, one rank, on random tokens that repeat.

    Args:
        graphs: replay forward and backward as a CUDA graph, as ``train.cuda_graphs`` does.
    """

    def __init__(
        self,
        sizes: Gpt,
        recipe: str | None,
        backend: str,
        *,
        graphs: bool = False,
        dropout: float = 0.0,
        fp8_param: bool = False,
    ):
        from megatron.core import tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        from megatron_fp8 import TransformerConfig
        from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
        from megatron_fp8.train.cuda_graph import IterationGraph, side_stream

        torch.manual_seed(1)
        if torch.cuda.is_available():
            tensor_parallel.random.initialize_rng_tracker(use_cudagraphable_rng=graphs, force_reset=True)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        fp8 = (
            {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_backend": backend, "fp8_param": fp8_param}
            if recipe
            else {}
        )
        moe = {"num_moe_experts": sizes.experts, **EXPERTS} if sizes.experts else {}
        self.sizes = sizes
        self.config = config = TransformerConfig(
            num_layers=sizes.layers,
            hidden_size=sizes.hidden,
            num_attention_heads=sizes.heads,
            num_query_groups=sizes.groups,
            ffn_hidden_size=sizes.ffn,
            gated_linear_unit=True,
            activation_func=F.silu,
            normalization="RMSNorm",
            add_bias_linear=False,
            hidden_dropout=dropout,
            attention_dropout=0.0,
            bias_activation_fusion=True,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_cpu_initialization=not torch.cuda.is_available(),
            gradient_accumulation_fusion=False,
            **moe,
            **fp8,
        )
        model = GPTModel(
            config,
            get_gpt_layer_fp8_spec(config),
            vocab_size=sizes.vocabulary,
            max_sequence_length=sizes.sequence,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
        if torch.cuda.is_available():
            model.cuda(torch.cuda.current_device())
        config.finalize_model_grads_func = finalize_model_grads
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        with side_stream() if graphs else nullcontext():
            self.model = DistributedDataParallel(config, ddp, Float16Module(config, model))
        self.graph = IterationGraph(self.model, self._passes, 1) if graphs else None
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0, loss_scale=1.0
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        config.grad_scale_func = self.optimizer.scale_loss
        device = next(self.model.parameters()).device
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(
            sizes.vocabulary, (4, sizes.batch, sizes.sequence + 1), generator=generator
        ).to(device)
        self.positions = torch.arange(sizes.sequence, device=device).expand(sizes.batch, -1)
        self._iteration = 0

    def step(self) -> Tensor:
        """One optimizer step; the loss before it, on the device."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = iter([{"tokens": self.tokens[self._iteration % len(self.tokens)]}])
        self._iteration += 1
        graph = self.graph if self.graph is not None and self.graph.ready() else None
        (loss,) = self._passes(batches) if graph is None else graph.run(batches)
        self.optimizer.step()
        return loss.clone()  # the next replay overwrites it

    def _passes(self, batches: Iterator[dict[str, Tensor]]) -> list[Tensor]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        results = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=batches,
            model=self.model,
            num_microbatches=1,
            seq_length=self.sizes.sequence,
            micro_batch_size=self.sizes.batch,
            forward_only=False,
        )
        return [result["loss"] for result in results]

    def _forward(self, data: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
        tokens = next(data)["tokens"]
        losses = model(tokens[:, :-1].contiguous(), self.positions, None, labels=tokens[:, 1:].contiguous())
        return losses, _mean

    def report(self) -> list[dict[str, Any]]:
        """One entry per GEMM site: precision, backend, reason."""
        from megatron_fp8.mcore.report import site_report

        return site_report([self.model], gather=False)

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(math.prod(p.shape) for p in self.model.parameters())


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach()}
