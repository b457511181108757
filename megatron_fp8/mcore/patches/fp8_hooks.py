"""The patches that connect Megatron-Core to this package's FP8 context, layers, recompute and iteration end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel

from ... import fp4_utils, fp8_utils
from ...inference.calibration import fp8_modules
from ...plan.autocast_state import remember_fp8
from .. import environment as compat
from .. import params, spec
from ..checkpoint.state_dict import without_missing_histories
from ..checkpoint.store import TensorsOnly
from ..config import transformer_config
from ..config.transformer_config import IterationEnd
from ..iteration import announce_phases_of_load
from ..layers import activation, attention, cross_entropy, linear, moe_layer
from ..optimizer import cpu_offload, fp8_params, layer_wise, loss_scaler, optimizer_setup, sharded_state
from ..runtime import state_of
from ..sites import cache_weights, is_model, prepare, prepared_models, register_model
from ..te import context as te_context
from . import megatron_fixes, missing_packages
from .patching import Patch, PatchList

_hooks = PatchList()
_SCHEDULES = "pipeline_parallel.schedules"

_hooks.replace(
    "fp8_utils.get_fp8_context",
    te_context.get_fp8_context,
    "without Transformer Engine it is a nullcontext: FP8 was requested and BF16 runs silently",
    everywhere=True,
)
_hooks.replace(
    "fp8_utils.get_fp8_recipe",
    fp8_utils.get_fp8_recipe,
    "without Transformer Engine it returns None",
    everywhere=True,
)
_hooks.replace(
    "fp8_utils.get_fp8_align_size",
    fp8_utils.get_fp8_align_size,
    "it recognises mxfp8 by its name, and no other recipe with such blocks",
    everywhere=True,
)
for _name, _replacement, _reason in (
    ("get_fp4_context", te_context.get_fp8_context, "without Transformer Engine it is a nullcontext"),
    ("get_fp4_recipe", fp4_utils.get_fp4_recipe, "without Transformer Engine it returns None"),
    ("get_fp4_align_size", fp4_utils.get_fp4_align_size, "it pads to what Transformer Engine's kernels want"),
    ("is_nvfp4tensor", fp4_utils.is_nvfp4tensor, "it knows Transformer Engine's tensors only"),
    ("dequantize_fp4_tensor", fp4_utils.dequantize_fp4_tensor, "it asks for Transformer Engine's version"),
):
    _hooks.replace(f"fp4_utils.{_name}", _replacement, _reason, everywhere=True)


def patches() -> list[Patch]:
    """Returns all patches of Megatron-Core 0.16 that do not depend on the device."""
    return [
        *megatron_fixes.patches,
        *missing_packages.fusions,
        *([] if compat.has_te() else missing_packages.without_te),
        *_hooks,
        *transformer_config.patches,
        *spec.patches,
        *params.patches,
        *cpu_offload.patches,
        *fp8_params.patches,
        *layer_wise.patches,
        *activation.patches,
        *attention.patches,
        *cross_entropy.patches,
        *linear.patches,
        *loss_scaler.patches,
        *optimizer_setup.patches,
        *moe_layer.patches,
        *sharded_state.patches,
    ]


@_hooks.wrap(
    "fp8_utils.prepare_model_for_fp8_inference",
    "it knows Transformer Engine's linears only, and without Transformer Engine it raises",
    everywhere=True,
)
def prepare_model_for_fp8_inference(original: Callable[[Any], Any], model: Any) -> Any:
    """Calls Megatron-Core's function for Transformer Engine models; all other models get this package's."""
    ours = any(module.fp8_site.quantizers["weight"] for module in fp8_modules(model))
    return (fp8_utils.prepare_model_for_fp8_inference if ours or not compat.has_te() else original)(model)


def fp8_checkpoint(
    forward: Callable[..., Any],
    distribute_saved_activations: bool,
    _rng: Any,
    _group: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Transformer Engine's checkpoint signature over Megatron's own: the recomputation runs in the same autocast state.

    Tensors passed by keyword, as in multi-token prediction, are passed on by position: gradients flow to no others.
    """
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
    return te_context.checkpoint(fp8_checkpoint, theirs)


for _module in (
    "transformer.transformer_block",
    "transformer.moe.moe_layer",
    "extensions.transformer_engine",
):
    _hooks.replace(
        f"{_module}.te_checkpoint",
        checkpoint_of_backend,
        "with fp8 Megatron recomputes through Transformer Engine's checkpoint",
        wrap=True,
        create=True,
    )


@_hooks.wrap(
    "transformer.module.MegatronModule.set_is_first_microbatch",
    "called by every schedule before an iteration's first forward: sites get their names then",
)
def prepare_at_first_microbatch(original: Callable[[Any], None], self: Any) -> None:
    """Prepares the model's FP8 sites first."""
    prepare([self])
    params.refuse_bf16_weights(self)
    original(self)


def keep_weights_for_microbatches(original: Callable[..., Any], *, model: Any, **kwargs: Any) -> Any:
    """Wraps a schedule, so that weights' codes are cached from microbatch to microbatch.

    Only inside a schedule: a custom loop, or code that merges adapters, may write weights at any time.
    """
    with cache_weights(model if isinstance(model, list) else [model]):
        return original(model=model, **kwargs)


for _schedule in ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving"):
    _hooks.wrap(
        f"{_SCHEDULES}.forward_backward_{_schedule}",
        "weights are quantized once for all microbatches of an iteration, while no other code can write them",
        everywhere=True,
    )(keep_weights_for_microbatches)


@_hooks.wrap(
    "transformer.module.MegatronModule.__init__",
    "a training loop without Megatron's schedules calls nothing before the first forward",
)
def prepare_at_first_forward(
    original: Callable[..., None], self: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """An FP8 model's sites get their names before its, or its part's, first forward in training."""
    original(self, config, *args, **kwargs)
    register_model(self)
    if is_model(self) and fp8_utils.quantizes(config):
        self.register_forward_pre_hook(_prepare_before)


def _prepare_before(model: Any, args: Any) -> None:
    if torch.compiler.is_compiling() or model in prepared_models:
        return
    if model.training or torch.is_grad_enabled():
        prepare([model])


@_hooks.wrap(
    "transformer.module.MegatronModule.sharded_state_dict",
    "a model that loads a checkpoint before its first forward would leave histories in it",
)
def prepare_before_sharding(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A model on its device names its sites first: linears describe histories only then."""
    names = is_model(self) and fp8_utils.quantizes(self.config) and self not in prepared_models
    if names and all(each.device == state_of(self.config).device for each in self.parameters()):
        prepare([self])
    return original(self, *args, **kwargs)


@_hooks.wrap(
    "dist_checkpointing.serialization.load",
    "it fails on histories that the checkpoint lacks: one of a BF16 run, or of another recipe",
    everywhere=True,
)
def load_histories_that_exist(
    original: Callable[..., Any], sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any
) -> Any:
    """Asks for the histories that the checkpoint has; the other ones start anew."""
    if not isinstance(kwargs.get("sharded_strategy"), TensorsOnly):  # this package's loader has done it
        sharded_state_dict = without_missing_histories(sharded_state_dict, checkpoint_dir)
        announce_phases_of_load()
    return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)


@_hooks.wrap(
    f"{_SCHEDULES}.get_model_config",
    "a plain Megatron config does not wrap finalize_model_grads_func by itself",
)
def end_iterations_of_plain_configs(original: Callable[[Any], Any], model: Any) -> Any:
    """A Megatron config (not this package's) ends FP8 iterations too."""
    config = original(model)
    if fp8_utils.quantizes(config) and not isinstance(config.finalize_model_grads_func, IterationEnd):
        config.finalize_model_grads_func = IterationEnd(config.finalize_model_grads_func)
    return config
