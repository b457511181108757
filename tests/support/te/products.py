"""Transformer Engine's linears and norms on a CPU: real but for their products, which are this package's.

``compute()`` puts this package's emulated GEMMs in the place of the autograd functions: each operand is cast as the
layer's own quantizer says, so a setting that did not arrive changes the loss. What is computed says nothing about
Transformer Engine's numbers. Delayed scales are not updated: the casts take the tensor's own scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.linear.tensor_parallel import ALONE, TensorParallel
from megatron_fp8.numerics.formats import E2M1, E4M3, E5M2, ROLES
from megatron_fp8.numerics.rule import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_16X16,
    BLOCK_128X128,
    TENSOR,
    Rule,
)  # fmt: skip
from megatron_fp8.plan.site_plan import fp8_site
from megatron_fp8.recipe import CustomRecipe
from megatron_fp8.state.fp8_state import Fp8State

entered: list[str] = []
"""The recipes of the contexts that were entered; 'checkpoint' where Transformer Engine recomputes."""
updates: list[Any] = []
"""The arguments of the updates of delayed scales."""
multiplied: list[GemmSite] = []
"""The site of each FP8 forward."""


def rule_of(quantizer: Any, *, columnwise: bool = False) -> Rule | None:
    """This package's rule for a quantizer's codes; None for one that leaves values as they are."""
    kind = type(quantizer).__name__
    if kind == "IdentityQuantizer":
        return None
    if kind == "NVFP4Quantizer":
        assert quantizer.with_post_rht_amax == quantizer.with_rht
        block = BLOCK_16X16 if quantizer.with_2d_quantization else BLOCK_1X16
        transformed = quantizer.with_rht and columnwise
        return Rule(E2M1, block, "e4m3", stochastic=quantizer.stochastic_rounding, hadamard=transformed)
    fmt = {"kFloat8E4M3": E4M3, "kFloat8E5M2": E5M2}[quantizer.dtype.name]
    if kind == "MXFP8Quantizer":
        return Rule(fmt, BLOCK_1X32, "e8m0")
    if kind == "Float8Quantizer":
        return Rule(fmt, TENSOR, "fp32")
    scale: Any = "pow2" if quantizer.force_pow_2_scales else "fp32"
    blocks = {1: BLOCK_1X128, 2: BLOCK_128X128}
    granularity = TENSOR if kind == "Float8CurrentScalingQuantizer" else blocks[quantizer.block_scaling_dim]
    return Rule(fmt, granularity, scale, epsilon=quantizer.amax_epsilon)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantizers: Mapping[str, Any] | None,
    tp: TensorParallel,
) -> torch.Tensor:
    rules: dict[str, Any] = dict.fromkeys(ROLES)
    if quantizers is not None:
        rules = {role: quantizer and rule_of(quantizer) for role, quantizer in quantizers.items()}
    plan = fp8_site("engine", None, CustomRecipe(rules.__getitem__), "emulated", "as its quantizers say")
    site = GemmSite(plan, Fp8State(torch.device("cpu")), None)
    multiplied.extend([site] if quantizers is not None else [])
    return fp8_linear(x, weight, bias, site, tp, fresh_weight=True)


def _communication(mode: str | None, group: Any, sequence_parallel: bool) -> TensorParallel:
    """What a layer of Transformer Engine sends around its products."""
    if mode is None or group is None:
        return ALONE
    assert sequence_parallel or group.size() == 1, "the sums over ranks are Megatron-Core's reduce-scatters"
    return TensorParallel.of(mode, group, sequence_parallel=sequence_parallel)  # type: ignore[arg-type]


class _Linear:
    """In the place of Linear's autograd function, as 2.20 calls it."""

    @staticmethod
    def apply(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, args: Any) -> Any:
        quantizers = {role: getattr(args, f"{role}_quantizer") for role in ("input", "weight", "grad_output")}
        tp = _communication(args.parallel_mode, args.tp_group, args.sequence_parallel)
        return _product(x, weight, bias, quantizers if args.fp8 else None, tp), None

    @classmethod
    def forward(cls, ctx: None, *args: Any) -> Any:
        return cls.apply(*args)


class _LayerNormLinear:
    """In the place of LayerNormLinear's, as 2.20 calls it."""

    @staticmethod
    def apply(x: Any, gamma: Any, beta: Any, weight: Any, workspace: Any, bias: Any, args: Any) -> Any:
        eps, _, fp8, *others = args
        quantizers = dict(
            zip(("input", "weight", "grad_output"), (others[3], others[4], others[8]), strict=True)
        )
        tp = _communication(others[15], others[10], others[12])
        normed = norm(x, gamma, beta, eps)
        return _product(normed, weight, bias, quantizers if fp8 else None, tp), None, None

    @classmethod
    def forward(cls, ctx: None, *args: Any) -> Any:
        return cls.apply(*args)


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """This package's RMSNorm, or with a bias torch's LayerNorm, of x [..., features]."""
    from megatron_fp8.mcore.layers.norm import rms_norm

    if bias is None:
        return rms_norm(x, weight, eps)
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


def compute(extension: Any) -> None:
    """Makes the layers of the installed Transformer Engine compute, and fills the lists above."""
    import transformer_engine.pytorch as engine
    from transformer_engine.pytorch import distributed
    from transformer_engine.pytorch.module import layernorm_linear, linear
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as manager

    linear._Linear, layernorm_linear._LayerNormLinear = _Linear, _LayerNormLinear
    for kind in (engine.LayerNorm, engine.RMSNorm):
        kind.forward = lambda self, x: norm(x, self.weight, getattr(self, "bias", None), self.eps)
    extension.fused_amax_and_scale_update_after_reduction = lambda *args: updates.append(args)
    enter = manager.autocast_enter

    def autocast_enter(enabled: bool = False, **kwargs: Any) -> None:
        entered.extend([repr(kwargs["fp8_recipe"])] if enabled else [])
        enter(enabled=enabled, **kwargs)

    manager.autocast_enter = autocast_enter
    distributed._get_cuda_rng_state = lambda **kwargs: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, **kwargs: torch.set_rng_state(state)
    recompute = distributed.checkpoint

    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        entered.append("checkpoint")
        return recompute(*args, **kwargs)

    distributed.checkpoint = checkpoint
