"""Which FP8 settings of a `TransformerConfig` are valid: errors name the value, the rule and the remedy."""

from __future__ import annotations

import difflib
import importlib
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from megatron_fp8.mcore import compat
from megatron_fp8.mcore.te_checks import check_te_settings
from megatron_fp8.size_filter import load_table

if TYPE_CHECKING:
    from megatron_fp8.mcore.config import TransformerConfig

FP8_FORMATS = ("e4m3", "hybrid")
RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "custom")
BACKENDS = ("auto", "emulated", "native", "transformer_engine")
FALLBACKS = ("error", "warn")
AMAX_ALGORITHMS = ("most_recent", "max")
DEFAULT_RECIPE = "delayed"  # Megatron-Core's


def check_fp8_settings(config: TransformerConfig) -> None:
    """Normalise names to plain strings and check every FP8 setting of `config`. Raises ValueError."""
    if config.fp8 is False:  # as other libraries say it
        config.fp8 = None
    if config.fp8 is not None:
        config.fp8 = one_of("fp8", config.fp8, FP8_FORMATS, also=(), none="None (FP8 off)")
    config.fp8_recipe = one_of("fp8_recipe", config.fp8_recipe or DEFAULT_RECIPE, RECIPES)
    if config.fp8_backend is not None:
        one_of("fp8_backend", config.fp8_backend, BACKENDS)
    one_of("fp8_fallback", config.fp8_fallback, FALLBACKS)
    one_of("fp8_amax_compute_algo", config.fp8_amax_compute_algo, AMAX_ALGORITHMS)
    _integer("fp8_margin", config.fp8_margin, 0, "scales are multiplied by 2^-margin")
    _integer("fp8_interval", config.fp8_interval, 1, "1 recomputes delayed scales every iteration")
    _integer("fp8_amax_history_len", config.fp8_amax_history_len, 1, "1 keeps only the last iteration's amax")
    for name in _BOOLEANS:
        _boolean(name, getattr(config, name))
    if config.fp8_pow2_scales is not None:
        _boolean("fp8_pow2_scales", config.fp8_pow2_scales)
    _check_epsilon(config.fp8_amax_epsilon)
    _check_phases(config)
    _check_overrides(config)
    _check_size_filter(config)
    _check_bf16_layers(config)
    _check_factory(config)
    _check_interleaving(config)
    if config.activation_func_fp8_input_store and not config.bias_activation_fusion:
        raise ValueError(
            "activation_func_fp8_input_store=True has no effect with bias_activation_fusion=False, Megatron-Core then "
            "stores the input as it is. Set bias_activation_fusion=True, or drop it."
        )
    if config.fp8_param and not config.fp8:
        raise ValueError(
            "fp8_param=True needs FP8 training, and fp8 is None. Set fp8='hybrid' or 'e4m3', or drop it."
        )
    if config.fp8_param and not config.bf16:
        raise ValueError(
            f"fp8_param=True with bf16={config.bf16!r}, fp16={config.fp16!r}: masters are rounded to BF16 before they are"
            " cast to FP8. Set bf16=True and params_dtype=torch.bfloat16, or fp8_param=False."
        )
    if config.fp8:
        _check_fp16(config)
        _check_available(config)
        _check_pow2(config)
        check_te_settings(config)
    _warn_without_effect(config)


_BOOLEANS = ("fp8_wgrad", "fp8_stochastic_rounding", "fp8_guard", "fp8_param", "first_last_layers_bf16")


def plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def one_of(
    name: str, value: Any, allowed: tuple[str, ...], also: tuple[str, ...] = (), none: str | None = None
) -> str:
    value = plain(value)
    if value in (*allowed, *also):
        return str(value)
    choices = ", ".join(repr(choice) for choice in (*allowed, *also)) + (f" or {none}" if none else "")
    near = difflib.get_close_matches(str(value).lower(), (*allowed, *also), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name}={value!r} is unknown: it must be one of {choices}.{hint}")


def _integer(name: str, value: Any, least: int, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least} ({meaning}).")


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False.")


def _check_epsilon(value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        raise ValueError(f"fp8_amax_epsilon={value!r} must be a finite number >= 0; 0 switches it off.")


def _check_phases(config: TransformerConfig) -> None:
    """The fractions of training in BF16, at its start and at its end."""
    for name in _PHASES:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(
                f"{name}={value!r} must be a number from 0 to 1, the fraction of training in BF16; 0 switches it off."
            )
    warmup, healing = (getattr(config, name) for name in _PHASES)
    if warmup + healing >= 1:
        raise ValueError(
            f"fp8_high_precision_warmup={warmup!r} and fp8_high_precision_healing={healing!r} leave nothing to FP8: their"
            " sum must be below 1. Lower one of them, or set fp8=None to train in BF16."
        )
    if config.fp8_param and (warmup or healing):
        raise ValueError(
            f"fp8_param=True with fp8_high_precision_warmup={warmup!r} and fp8_high_precision_healing={healing!r}: a"
            " phase in BF16 needs BF16 weights. Set fp8_param=False, or both fractions to 0."
        )


_PHASES = ("fp8_high_precision_warmup", "fp8_high_precision_healing")


def _check_overrides(config: TransformerConfig) -> None:
    overrides = config.fp8_overrides
    if not isinstance(overrides, Mapping):
        raise ValueError(
            f"fp8_overrides={overrides!r} must map globs over module names to 'bf16' or a recipe, such as "
            "{'*.linear_proj': 'bf16'}."
        )
    for glob, target in overrides.items():
        if not isinstance(glob, str) or not glob:
            raise ValueError(f"fp8_overrides has the key {glob!r}: keys are globs such as '*.linear_proj'.")
        one_of(f"fp8_overrides[{glob!r}]", target, ("bf16", *RECIPES))


def _check_size_filter(config: TransformerConfig) -> None:
    """The table itself; whether it is this device's is known when a site is planned."""
    path, tokens = config.fp8_size_filter, config.fp8_size_filter_tokens
    if tokens is not None:
        _integer("fp8_size_filter_tokens", tokens, 1, "the tokens of a microbatch")
    if path is None or not config.fp8:
        return
    if not isinstance(path, str) or not path:
        raise ValueError(
            f"fp8_size_filter={path!r} must be the path of a table that `megatron-fp8 bench --tune` wrote."
        )
    if not config.fp8_wgrad:
        raise ValueError(
            f"fp8_size_filter={path!r} with fp8_wgrad=False: its times are of three GEMMs in FP8. Set fp8_wgrad=True, or"
            " drop the filter."
        )
    measured = load_table(path).recipe
    if measured != config.fp8_recipe:
        raise ValueError(
            f"fp8_size_filter={path!r} was measured with recipe {measured!r}, and fp8_recipe is {config.fp8_recipe!r}:"
            f" measure again with `bench --tune --recipe {config.fp8_recipe}`, or drop the filter."
        )


def _check_bf16_layers(config: TransformerConfig) -> None:
    """Counts are over the whole model, by global layer index, whatever the pipeline layout."""
    if not config.first_last_layers_bf16:
        return
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= config.num_layers:
            raise ValueError(
                f"{name}={value!r} must be an integer from 0 to num_layers={config.num_layers}: lower it, or "
                "set first_last_layers_bf16=False."
            )
    start, end = config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16
    if start + end > config.num_layers:
        raise ValueError(
            f"num_layers_at_start_in_bf16={start} and num_layers_at_end_in_bf16={end} make {start + end} "
            f"layers, more than num_layers={config.num_layers}: lower one of them."
        )
    if config.fp8 and start + end == config.num_layers:
        _warn(f"all {config.num_layers} layers stay in BF16 ({start} first, {end} last): none runs in FP8")


def _check_interleaving(config: TransformerConfig) -> None:
    """With two interleaved stages, batched messages between them are matched by order alone and get swapped."""
    if not config.virtual_pipeline_model_parallel_size or config.pipeline_model_parallel_size != 2:
        return
    if config.batch_p2p_comm or not config.overlap_p2p_comm:
        raise ValueError(
            "virtual_pipeline_model_parallel_size with pipeline_model_parallel_size=2 needs overlap_p2p_comm=True "
            f"and batch_p2p_comm=False, not {config.overlap_p2p_comm!r} and {config.batch_p2p_comm!r}: Megatron-Core "
            "would swap activations and gradients between the two stages without a word."
        )


def _check_fp16(config: TransformerConfig) -> None:
    """Stages exchange activations in pipeline_dtype: of the right size and the wrong meaning if it is the other half."""
    stages, dtype = config.pipeline_model_parallel_size, config.pipeline_dtype
    if config.fp16 and stages > 1 and str(dtype) != "torch.float16":
        raise ValueError(
            f"pipeline_dtype={dtype} with fp16=True and pipeline_model_parallel_size={stages}: stages would read float16"
            " activations as something else. Set pipeline_dtype=torch.float16."
        )


def _check_factory(config: TransformerConfig) -> None:
    path = config.fp8_quantizer_factory
    names_custom = "custom" in (config.fp8_recipe, *config.fp8_overrides.values())
    if not names_custom:
        if path is not None and config.fp8:
            raise ValueError(
                f"fp8_quantizer_factory={path!r} is used only by fp8_recipe='custom', and fp8_recipe is "
                f"{config.fp8_recipe!r}: set fp8_recipe='custom' or drop the factory."
            )
        return
    if config.fp8:
        import_factory(path)


def import_factory(path: str | None) -> Callable[..., Any]:
    """The quantizer factory at the import path `package.module.function`. ValueError when there is none."""
    remedy = (
        "give fp8_quantizer_factory the import path of a callable, such as 'my_package.my_module.factory'"
    )
    if not isinstance(path, str) or not path:
        raise ValueError(
            f"fp8_recipe='custom' needs a factory and fp8_quantizer_factory is {path!r}: {remedy}."
        )
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ValueError(f"fp8_quantizer_factory={path!r} names no module: {remedy}.")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # user code: whatever its import raises is the reason to show
        raise ValueError(
            f"fp8_quantizer_factory={path!r}: importing {module_name!r} failed ({type(error).__name__}: "
            f"{error}); {remedy}."
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        found = "has no such attribute" if factory is None else f"has a {type(factory).__name__} there"
        raise ValueError(
            f"fp8_quantizer_factory={path!r} is not callable: {module_name!r} {found}; {remedy}."
        )
    return factory


def _check_pow2(config: TransformerConfig) -> None:
    wanted, recipe = config.fp8_pow2_scales, config.fp8_recipe
    if wanted is False and recipe in ("rowwise", "mxfp8"):
        raise ValueError(
            f"fp8_pow2_scales=False with fp8_recipe={recipe!r}: its scales are powers of two by definition. "
            "Leave it None, or use tensorwise or blockwise."
        )
    if wanted is True and recipe == "delayed":
        raise ValueError(
            "fp8_pow2_scales=True with fp8_recipe='delayed': delayed scaling has float32 scales. Leave it "
            "None, or use tensorwise, whose scales can be powers of two."
        )


_OWN_GRAPHS = (
    "Megatron-Core's CUDA graphs update FP8 through Transformer Engine, and a replay would skip the host's part of an"
    " iteration. Capture the step yourself, with megatron_fp8.graph.CapturedStep (docs/performance.md)"
)
_OFFLOADING = (
    "Megatron-Core moves activations by Transformer Engine, which is not installed. Set it to False, and wrap layers in"
    " torch.autograd.graph.save_on_cpu(), which keeps FP8 codes as they are, or recompute"
)

# (setting, is it asked for, what to do instead): never accepted and then ignored.
_UNAVAILABLE: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("fp8_guard", bool, "keep it False"),
    ("fp8_dot_product_attention", bool, "keep it False: attention itself runs in BF16"),
    ("fp8_multi_head_attention", bool, "keep it False: attention itself runs in BF16"),
    ("enable_cuda_graph", bool, f"keep it False: {_OWN_GRAPHS}"),
    ("external_cuda_graph", bool, f"keep it False: {_OWN_GRAPHS}"),
    ("cuda_graph_impl", lambda value: value != "none", f"keep it 'none': {_OWN_GRAPHS}"),
    ("cpu_offloading", lambda value: value and not compat.has_te(), _OFFLOADING),
    ("fine_grained_activation_offloading", lambda value: value and not compat.has_te(), _OFFLOADING),
    ("tp_comm_overlap", bool, "keep it False: the FP8 linears overlap their communication without it"),
    ("delay_wgrad_compute", bool, "keep it False when training in FP8"),
    (
        "gradient_accumulation_fusion",
        lambda value: value and not compat.uses_apex("fused_weight_gradient_mlp_cuda"),
        "it needs a GPU and apex with fused_weight_gradient_mlp_cuda. Keep it False: FP8 linears accumulate into"
        " main_grad without it",
    ),
    ("use_kitchen", bool, "keep it False when training in FP8"),
)


def _check_available(config: TransformerConfig) -> None:
    for name, asked_for, remedy in _UNAVAILABLE:
        value = getattr(config, name)
        if asked_for(value):
            raise ValueError(
                f"{name}={value!r} is not available in this version with fp8={config.fp8!r}: {remedy}."
            )


def _warn_without_effect(config: TransformerConfig) -> None:
    """Say what was set and does nothing, because another setting switches it off."""
    default = {f.name: f.default for f in fields(config)}

    def is_set(name: str) -> bool:
        return getattr(config, name) != default[name]

    if not config.first_last_layers_bf16:
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if is_set(name):
                _warn(f"{name}={getattr(config, name)!r} has no effect with first_last_layers_bf16=False")
    if not config.fp8:
        for name in ("fp8_recipe", "fp8_backend", "fp8_stochastic_rounding", "fp8_size_filter", *_PHASES):
            if is_set(name):
                _warn(
                    f"{name}={getattr(config, name)!r} has no effect because fp8 is None (training in BF16)"
                )
        return
    if config.fp8_recipe != "delayed" and "delayed" not in config.fp8_overrides.values():
        for name in ("fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo"):
            if is_set(name):
                _warn(f"{name}={getattr(config, name)!r} has no effect with fp8_recipe={config.fp8_recipe!r}")
    if config.fp8_recipe == "mxfp8" and is_set("fp8_amax_epsilon"):
        _warn(f"fp8_amax_epsilon={config.fp8_amax_epsilon!r} has no effect with fp8_recipe='mxfp8'")


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)
