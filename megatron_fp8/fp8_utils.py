"""The interface for Megatron users: Megatron's names and signatures, without Transformer Engine.

``config`` is any object with Megatron's FP8 fields; this package's own fields are read if present.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .inference import prepare_for_inference
from .numerics.formats import parse_format
from .params.fp8_parameter import Fp8Parameter
from .params.shards import quantize_shards
from .plan.autocast_state import building_layer, fp8_disabled
from .plan.settings import FP4_OPTIONS, RecipeSettings, from_settings
from .recipe import Recipe, alignment, check_recipe_name
from .tensor import Float8Tensor

__all__ = [
    "correct_amax_history_if_needed",
    "dequantize_fp8_tensor",
    "get_fp8_align_size",
    "get_fp8_context",
    "get_fp8_recipe",
    "is_first_last_bf16_layer",
    "is_float8tensor",
    "modify_underlying_storage",
    "post_all_gather_processing",
    "prepare_model_for_fp8_inference",
    "quantize_param_shard",
]


def quantizes(config: Any) -> bool:
    """Whether linears of this config's models are quantized: fp8 is on, or fp4."""
    return bool(getattr(config, "fp8", None) or getattr(config, "fp4", None))


def has_fp8_params(config: Any) -> bool:
    """Whether quantized weights are kept as codes alone: fp8_param in an FP8 model, fp4_param in an FP4 model."""
    switch = switch_of(config)
    return bool(getattr(config, switch, None) and getattr(config, f"{switch}_param", False))


def switch_of(config: Any) -> str:
    """Returns the field that quantizes: 'fp4' if it is on, else 'fp8'."""
    return "fp4" if getattr(config, "fp4", None) else "fp8"


def switch_shown(config: Any) -> str:
    """Formats the field that is on: "fp8='hybrid'", "fp4='e2m1'"."""
    return f"{switch_of(config)}={_text(getattr(config, switch_of(config)))!r}"


def recipe_setting(config: Any) -> str:
    """Returns the field that names the recipe of all linears: 'fp8_recipe' or 'fp4_recipe'."""
    return f"{switch_of(config)}_recipe"


def recipe_name_of(config: Any) -> str:
    """Returns the name of the recipe of all linears."""
    return _text(getattr(config, recipe_setting(config)))


def get_fp8_recipe(config: Any, name: str | None = None) -> Recipe:
    """Returns the recipe that the config describes, of FP8 or FP4.

    Args:
        config: fp8, fp8_recipe, fp8_margin, fp8_interval, fp8_amax_history_len, fp8_amax_compute_algo,
            fp8_quantizer_factory; fp4, fp4_recipe, fp4_quantizer_factory; and this package's options if present.
        name: a recipe to use in place of the config's, with its options. With fp4, FP8 recipes have the formats that
            they have by default.

    Raises:
        ValueError: fp8 and fp4 are off, a name is unknown, or an option does not exist for the recipe.
    """
    if not quantizes(config):
        raise ValueError(
            "config.fp8 is None: set fp8='hybrid' or fp8='e4m3' to train in FP8, fp4='e2m1' in FP4"
        )
    prefix = f"{switch_of(config)}_"
    if name is None and config.fp8 and _text(config.fp8_recipe) == "nvfp4":
        raise ValueError(NVFP4_AS_FP8)
    settings = RecipeSettings(
        fp8_format=parse_format(_text(config.fp8)) if config.fp8 else None,
        margin=config.fp8_margin,
        amax_epsilon=getattr(config, "fp8_amax_epsilon", 0.0),
        pow2_scales=getattr(config, "fp8_pow2_scales", None),
        stochastic_rounding=getattr(config, "fp8_stochastic_rounding", False),
        amax_history_len=getattr(config, "fp8_amax_history_len", None),
        amax_compute_algo=getattr(config, "fp8_amax_compute_algo", None),
        interval=getattr(config, "fp8_interval", None),
        quantizer_factory=getattr(config, f"{prefix}quantizer_factory", None),
        **{option: getattr(config, f"fp4_{option}", None) for option in FP4_OPTIONS},
        prefix=prefix,
    )
    return from_settings(name or recipe_name_of(config), settings)


NVFP4_AS_FP8 = "fp8_recipe='nvfp4' has 4-bit codes: set fp4='e2m1' and fp8=None in its place"


def _text(value: Any) -> str:
    """Returns the value of a string-valued enum, or the string itself."""
    return str(getattr(value, "value", value))


def is_first_last_bf16_layer(config: Any, layer_no: int) -> bool:
    """Whether layer layer_no (global, from 0; negative: no particular layer) stays in BF16."""
    if layer_no < 0 or not config.first_last_layers_bf16:
        return False
    return (
        layer_no < config.num_layers_at_start_in_bf16
        or layer_no >= config.num_layers - config.num_layers_at_end_in_bf16
    )


def get_fp8_context(config: Any, layer_no: int = -1, is_init: bool = False) -> AbstractContextManager[None]:
    """Returns the context in which Megatron-Core builds (is_init=True) or runs a layer.

    Args:
        config: a TransformerConfig.
        layer_no: global layer index from 0, the same on every pipeline stage; -1 for all layers at once, as Megatron
            does with delayed scaling.
        is_init: True while building: linears made inside get the layer number, and their plan decides whether it
            stays in BF16. False while running: in a first or last layer that stays in BF16, linears whose plan has no
            layer number (Fp8Linear, or one that was built outside such a context) run in high precision. Leaving the
            context updates nothing, so delayed scaling works together with BF16 layers.
    """
    if not quantizes(config):
        return nullcontext()
    reason = None
    if is_first_last_bf16_layer(config, layer_no):
        start, end = config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16
        reason = f"first_last_layers_bf16: the first {start} and last {end} layers stay in BF16"
    if is_init:
        return building_layer(layer_no, reason)
    return nullcontext() if reason is None else fp8_disabled(reason, unplanned=True)


def get_fp8_align_size(fp8_recipe: Any) -> int:
    """Returns the multiple to which Megatron-Core pads experts' tokens: 32 for MXFP8 and similar blocks, else 16.

    GEMMs here are faster with it. 'custom' is 16: its rules do not follow from its name.

    Raises:
        ValueError: no recipe has that name.
    """
    name = check_recipe_name(_text(fp8_recipe))
    return 16 if name == "custom" else alignment(from_settings(name, RecipeSettings()))


def is_float8tensor(tensor: Any) -> bool:
    """Whether this is a quantized tensor of this package: an Fp8Parameter or a Float8Tensor."""
    return isinstance(tensor, (Fp8Parameter, Float8Tensor))


def dequantize_fp8_tensor(fp8_tensor: Fp8Parameter | Float8Tensor) -> torch.Tensor:
    """Returns the matrix in its dtype before quantization."""
    return fp8_tensor.dequantize()


def modify_underlying_storage(tensor: Fp8Parameter, new_raw_data: torch.Tensor) -> None:
    """Moves the codes of an FP8 weight into ``new_raw_data``: uint8 memory of its size, a slice of Megatron's buffer.

    Raises:
        ValueError: other dtype or size, or a weight that is sent in BF16.
    """
    tensor.replace_storage(new_raw_data)


def quantize_param_shard(
    model_params: Sequence[Fp8Parameter],
    main_params: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    data_parallel_group: Any,
    fsdp_shard_model_params: Any = None,
) -> None:
    """Casts this rank's pieces of the float32 masters into the FP8 weights, with the scales of the whole tensors.

    Arguments as params/shards.py's quantize_shards; collective over the data-parallel group.

    Raises:
        ValueError: fsdp_shard_model_params is given: Megatron-FSDP is not supported.
    """
    if fsdp_shard_model_params is not None:
        raise ValueError("FP8 parameters under Megatron-FSDP are not available in this version")
    quantize_shards(model_params, main_params, start_offsets, data_parallel_group)


def post_all_gather_processing(model_params: Sequence[Fp8Parameter]) -> None:
    """Rebuilds the other direction of each weight, which is not sent, after the gather of the codes."""
    for param in model_params:
        param.refresh()


def correct_amax_history_if_needed(model: Any) -> None:
    """Does nothing: a forward pass that uses the weight records its amax, so copies do not change the history."""


def prepare_model_for_fp8_inference(model: Any) -> Any:
    """Quantizes the weights of the model's FP8 linears once and pads their tokens where kernels are faster. In place.

    Returns the same model. Megatron-Core's inference wrappers call it with a GPTModel; a model of nn.Fp8Linear is
    accepted too. More options: inference.prepare_for_inference. A prepared model is returned unchanged.

    Raises:
        ValueError: the model has no FP8 linear.
    """
    return model if hasattr(model, "fp8_inference") else prepare_for_inference(model)
