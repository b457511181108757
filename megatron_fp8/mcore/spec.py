"""Layer specs: Megatron-Core's own GPT layer, with this package's linears, norm and core attention in it."""

from __future__ import annotations

from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec

from . import is_installed
from .apex import norm_class
from .attention import CoreAttention
from .layers import Fp8ColumnParallelLinear, Fp8RowParallelLinear
from .te_context import choose_te_layers


class Fp8SpecProvider(LocalSpecProvider):
    """Megatron-Core's local modules, the GEMMs of which can run in FP8, and which run under SP and CP without TE."""

    def column_parallel_linear(self) -> type:
        """Column-parallel linear."""
        return Fp8ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Row-parallel linear."""
        return Fp8RowParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """RMSNorm or LayerNorm, as config.normalization says."""
        return norm_class()

    def core_attention(self) -> type:
        """Attention between the projections, in high precision."""
        return CoreAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules | None]:
        """Experts one after another; ValueError for grouped GEMM."""
        if moe_use_grouped_gemm:
            raise ValueError("moe_grouped_gemm=True is not available in FP8 in this version: set it to False")
        return SequentialMLP, MLPSubmodules(
            linear_fc1=Fp8ColumnParallelLinear, linear_fc2=Fp8RowParallelLinear
        )


def get_gpt_layer_fp8_spec(config: Any) -> ModuleSpec:
    """The spec of a GPT layer for this config: dense or MoE, grouped-query attention, any norm, any backend.

    Raises:
        RuntimeError: megatron_fp8.mcore.install() was not called.
        ValueError: multi-latent attention; grouped GEMM for experts; Transformer Engine was asked for and cannot run.
    """
    _require_installed()
    if getattr(config, "multi_latent_attention", False):
        raise ValueError("multi_latent_attention=True is not available in this version: set it to False")
    if choose_te_layers(config):
        from .te_layers import te_layer_spec  # its base classes are Transformer Engine's

        return te_layer_spec(config)
    return gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )


def _require_installed() -> None:
    if not is_installed():
        raise RuntimeError(
            "call megatron_fp8.mcore.install() before building a model: it sets Megatron-Core's FP8 hooks"
        )


def __getattr__(name: str) -> ModuleSpec:
    # Megatron-LM's --spec imports an object and never calls it, so the dense spec is made when it is looked up.
    if name == "gpt_layer_fp8_spec":
        _require_installed()
        return gpt_layer_specs.get_gpt_layer_local_spec()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
