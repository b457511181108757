"""The patches that connect Megatron-Core to this package's FP8 context, layers, recompute and iteration end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ... import fp8_utils
from ...plan.autocast_state import remember_fp8
from .. import environment as compat
from .patching import Patch


def patches() -> list[Patch]:
    """Returns all FP8 hooks of Megatron-Core 0.16."""
    from .. import params
    from ..layers import activation, attention
    from ..layers import mla as latent_cache
    from ..layers.activation import store_expert_swiglu_input_in_fp8, store_swiglu_input_in_fp8
    from ..layers.linear import output_layer_in_fp8
    from ..optimizer import fp8_params as param_optimizer
    from ..optimizer import (
        grad_norm,
        loss_scaler,
        optimizer_setup,
        sharded_state,
    )
    from ..spec_replacement import build_own_modules, final_norm_of_the_layers
    from ..te import context as te_context
    from . import megatron_fixes, mla, token_dispatchers

    core = "megatron.core"
    checkpoint_why = "with fp8 Megatron recomputes through Transformer Engine's checkpoint"
    return [
        Patch(
            f"{core}.fp8_utils",
            "get_fp8_context",
            te_context.get_fp8_context,
            "without Transformer Engine it is a nullcontext: FP8 was requested and BF16 runs silently",
            everywhere=True,
        ),
        Patch(
            f"{core}.fp8_utils",
            "get_fp8_recipe",
            fp8_utils.get_fp8_recipe,
            "without Transformer Engine it returns None",
            everywhere=True,
        ),
        Patch(
            f"{core}.fp8_utils",
            "get_fp8_align_size",
            fp8_utils.get_fp8_align_size,
            "it recognises mxfp8 by its name, and no other recipe with such blocks",
            everywhere=True,
        ),
        Patch(
            f"{core}.transformer.spec_utils",
            "build_module",
            build_own_modules,
            "specs without Transformer Engine name linears that run in BF16 whatever fp8 says",
            wrap=True,
            everywhere=True,
        ),
        Patch(
            f"{core}.transformer.transformer_block",
            "_get_block_submodules",
            final_norm_of_the_layers,
            "the final norm of a block made from one layer's spec is not the spec's",
            wrap=True,
            everywhere=True,
        ),
        *(
            Patch(
                f"{core}.{module}",
                "te_checkpoint",
                checkpoint_of_backend,
                checkpoint_why,
                wrap=True,
                create=create,
            )
            for module, create in (
                ("transformer.transformer_block", False),
                ("transformer.moe.moe_layer", True),
                ("extensions.transformer_engine", True),
            )
        ),
        Patch(
            f"{core}.transformer.module.MegatronModule",
            "set_is_first_microbatch",
            prepare_at_first_microbatch,
            "called by every schedule before an iteration's first forward: sites get their names then",
            wrap=True,
        ),
        *(
            Patch(
                f"{core}.pipeline_parallel.schedules",
                f"forward_backward_{schedule}",
                keep_weights_for_microbatches,
                "weights are quantized once for all microbatches of an iteration, while no other code can write them",
                wrap=True,
                everywhere=True,
            )
            for schedule in (
                "no_pipelining",
                "pipelining_with_interleaving",
                "pipelining_without_interleaving",
            )
        ),
        Patch(
            f"{core}.models.common.language_module.language_module.LanguageModule",
            "__init__",
            prepare_at_first_forward,
            "a training loop without Megatron's schedules calls nothing before the first forward",
            wrap=True,
        ),
        Patch(
            f"{core}.models.common.language_module.language_module.LanguageModule",
            "setup_embeddings_and_output_layer",
            output_layer_in_fp8,
            "a model makes its output layer itself, and no spec names it",
            wrap=True,
        ),
        Patch(
            f"{core}.pipeline_parallel.schedules",
            "get_model_config",
            end_iterations_of_plain_configs,
            "a plain Megatron config does not wrap finalize_model_grads_func by itself",
            wrap=True,
        ),
        Patch(
            f"{core}.fusions.fused_bias_swiglu",
            "bias_swiglu_impl",
            store_swiglu_input_in_fp8,
            "activation_func_fp8_input_store stores codes without a scale",
            wrap=True,
            everywhere=True,
        ),
        Patch(
            f"{core}.fusions.fused_bias_swiglu",
            "weighted_bias_swiglu_impl",
            store_expert_swiglu_input_in_fp8,
            "activation_func_fp8_input_store stores codes without a scale",
            wrap=True,
            everywhere=True,
        ),
        *params.patches(),
        *param_optimizer.patches(),
        *grad_norm.patches(),
        *activation.patches(),
        *attention.patches(),
        *latent_cache.patches(),
        *loss_scaler.patches(),
        *optimizer_setup.patches(),
        *mla.patches(),
        *token_dispatchers.patches(),
        *sharded_state.patches(),
        *megatron_fixes.patches(),
    ]


def fp8_checkpoint(
    forward: Callable[..., Any],
    distribute_saved_activations: bool,
    _rng: Any,
    _group: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Transformer Engine's checkpoint signature over Megatron's own: the recomputation runs under the same FP8 switch.

    Tensors passed by keyword, as in multi-token prediction, are passed on by position: gradients flow to no others.
    """
    from megatron.core import tensor_parallel

    tensors = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    rest = {name: value for name, value in kwargs.items() if name not in tensors}

    def run(*inputs: Any) -> Any:
        named = dict(zip(tensors, inputs[len(args) :], strict=True))
        return forward(*inputs[: len(args)], **named, **rest)

    return tensor_parallel.checkpoint(
        remember_fp8(run), distribute_saved_activations, *args, *tensors.values()
    )


def checkpoint_of_backend(theirs: Callable[..., Any] | None) -> Callable[..., Any]:
    """Returns fp8_checkpoint; with Transformer Engine, its own checkpoint for its own FP8 layers."""
    if theirs is None or not compat.has_te():
        return fp8_checkpoint
    from ..te import context as te_context

    return te_context.checkpoint(fp8_checkpoint, theirs)


def prepare_at_first_microbatch(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wraps MegatronModule.set_is_first_microbatch: prepares the model's FP8 sites first."""

    def set_is_first_microbatch(self: Any) -> None:
        from ..params import refuse_bf16_weights
        from ..sites import prepare

        prepare([self])
        refuse_bf16_weights(self)
        original(self)

    return set_is_first_microbatch


def keep_weights_for_microbatches(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a schedule: caches weights' codes from microbatch to microbatch.

    Not outside of it: a custom loop, or code that merges adapters, may write weights at any time.
    """

    @functools.wraps(original)
    def schedule(*, model: Any, **kwargs: Any) -> Any:
        from ..sites import keeping_weights

        with keeping_weights(model if isinstance(model, list) else [model]):
            return original(model=model, **kwargs)

    return schedule


def prepare_at_first_forward(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps LanguageModule.__init__: an FP8 model's sites get their names before its first forward in training."""

    @functools.wraps(original)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        if config.fp8:
            self.register_forward_pre_hook(_prepare_before)

    return __init__


def _prepare_before(model: Any, args: Any) -> None:
    if (model.training or torch.is_grad_enabled()) and not torch.compiler.is_compiling():
        from ..sites import prepare

        prepare([model])


def end_iterations_of_plain_configs(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps get_model_config: a Megatron config (not this package's) ends FP8 iterations too."""

    def get_model_config(model: Any) -> Any:
        from ..config.transformer_config import IterationEnd

        config = original(model)
        if getattr(config, "fp8", None) and not isinstance(config.finalize_model_grads_func, IterationEnd):
            config.finalize_model_grads_func = IterationEnd(config.finalize_model_grads_func)
        return config

    return get_model_config


__all__ = ["fp8_checkpoint", "patches"]
