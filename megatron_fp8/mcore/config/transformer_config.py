"""`TransformerConfig` and `MLATransformerConfig`: Megatron-Core's, with this package's FP8 fields, all checked.

Each setting has one field. `fp8` switches FP8 on and names the element formats; `fp8_recipe` names the scaling rule.
The keyword `fp8_format` sets either: a recipe's name sets `fp8_recipe`; 'hybrid' and 'e4m3' set `fp8` and leave the
recipe. Building a model freezes the settings (`freeze`); changing one afterwards is an error.

Megatron-Core validates neither string, and refuses combinations that only Transformer Engine cannot run (delayed
scaling with first/last layers in BF16). Here the strings are checked and those combinations work.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.core.transformer import transformer_config as megatron_config

from ...fp8_utils import quantizes
from ...plan.settings import DEFAULT_RECIPE, FP8_FORMATS, fp8_format_field
from ...recipe import RECIPES
from ..patches.patching import PatchList
from ..runtime import find_runtime, runtime_of
from .fields import FIELD_RULES
from .fp8_checks import announce_settings, check_fp8_settings, plain
from .rules import check, one_of

patches = PatchList()

# Versions of Transformer Engine that Megatron-Core requires only for FP8. This package needs none of them.
_FP8_TE_VERSIONS = frozenset({"1.7.0.dev0", "1.11.0", "2.6.0dev0"})


@dataclass
class TransformerConfig(megatron_config.TransformerConfig):
    """Megatron-Core's `TransformerConfig` with FP8 and FP4 that run without Transformer Engine.

    All of Megatron's fields keep their names and, except fp8_recipe, their defaults; `fp8_format` is accepted too.

    Raises:
        ValueError: an FP8 value is unknown, out of range, in conflict with another, or names a feature that this
            version does not have. The message gives the value, the rule and the remedy.
    """

    fp8_recipe: str = DEFAULT_RECIPE
    """Scaling rule: a name in megatron_fp8.recipe.RECIPES. Megatron-Core's default is 'delayed'."""

    fp8_backend: str | None = None
    """The code that quantizes and multiplies: 'emulated' (any device), 'native' or 'transformer_engine' (GPU).
    None and 'auto' choose the best one that the device can run; the choice is printed."""

    fp8_fallback: str = "error"
    """For sites that cannot run as requested: 'error', or 'warn' (runs in BF16, recorded and printed)."""

    fp8_overrides: dict[str, str] = field(default_factory=dict)
    """Exceptions by layer: a glob over full module names to 'bf16' or a recipe's name."""

    fp8_amax_epsilon: float = 0.0
    """Lower bound for every amax before its scale is computed (all recipes but mxfp8)."""

    fp8_pow2_scales: bool | None = None
    """Scales rounded down to powers of two. None: the recipe's default (blockwise yes, tensorwise no)."""

    fp8_stochastic_rounding: bool = False
    """Round grad_output stochastically, reproducibly for a seed."""

    fp8_size_filter: str | None = None
    """A table of measured GEMMs (`megatron-fp8 bench --tune`): sites too small for FP8 to pay here run in BF16. The
    report has each measurement. None: size decides nothing. Overrides by name win."""

    fp8_size_filter_tokens: int | None = None
    """Tokens of a microbatch on a rank, by which the table decides; `megatron-fp8 train` knows them. They are micro
    batch size x sequence length / context parallel size. None elsewhere needs a table of one token count."""

    fp8_fast_accumulation: str = "fprop"
    """GEMMs whose partial sums tensor cores may keep at their own precision: fprop, all, none.
    H100 and H200 keep about 14 bits then, and are faster. Block scales never do."""

    fp8_keep_columnwise: bool = True
    """Keep dgrad's weight codes from forward to backward; False: make them again.
    The bits are the same: less memory, one cast more a microbatch."""

    fp8_output_layer: bool = False
    """Run the output projection (`output_layer`) in FP8 too. False: it stays in the model's dtype, as in Megatron-Core
    and in DeepSeek-V3. first_last_layers_bf16 is about transformer layers, and does not concern it."""

    moe_fp8_dispatch: bool = False
    """Send tokens to their experts as FP8 codes and scales, quantized once; likewise gradients of the experts' outputs.
    It needs a recipe with scales of a row or of 1xN blocks. False: in the model's dtype, as in Megatron-Core."""

    fp8_high_precision_warmup: float = 0.0
    """Fraction of training in BF16 before FP8 starts; delayed scaling fills its histories meanwhile."""

    fp8_high_precision_healing: float = 0.0
    """Fraction of training in BF16 again, at its end."""

    fp8_high_precision_healing_parts: list[str] | None = None
    """Take only these linears or GEMMs back to BF16 there: ["*:fprop"], or globs over names as in fp8_overrides. None:
    everything."""

    fp8_guard: bool | str = False
    """Move sites whose tensors are not finite, saturate or underflow to BF16; 'ladder': first to other recipes. True and
    'bf16' mean the same; 'ladder': delayed -> tensorwise -> blockwise -> BF16. False: off."""

    fp8_guard_patience: int = 3
    """Iterations in a row before fp8_guard moves a site."""

    fp4_disable_rht: bool = False
    """NVFP4 without the random Hadamard transform of wgrad's operands."""

    fp4_disable_stochastic_rounding: bool = False
    """NVFP4 with gradients rounded to the nearest code."""

    fp4_disable_2d_quantization: bool = False
    """NVFP4 weights in blocks of 1x16, with other codes in each direction, in place of 16x16."""

    if TYPE_CHECKING:  # at run time the dataclass generates it, with Megatron's fields too

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __post_init__(self) -> None:
        check_fp8_settings(self)
        announce_settings(self)
        if not quantizes(self):
            super().__post_init__()
            return
        # Megatron-Core refuses delayed scaling with BF16 layers and with recomputed norms, which this package runs. So it
        # checks a copy that has neither; the values that it derives from the other fields are copied back.
        checked = copy.copy(self)
        checked.fp8_recipe, checked.first_last_layers_bf16 = "tensorwise", False
        with _fp8_versions_present():
            super(TransformerConfig, checked).__post_init__()
        for name, derived in vars(checked).items():
            if name not in _REPLACED_FOR_CHECK and derived is not vars(self).get(name):
                setattr(self, name, derived)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.is_frozen and _is_fp8_setting(name):
            raise ValueError(
                f"{name}={value!r} comes after the model was built with {name}={getattr(self, name)!r}: FP8 "
                f"settings are fixed when the model is built. Set it before, or build the model again from"
                f" dataclasses.replace(config, {name}={value!r})."
            )
        super().__setattr__(name, value)

    @property
    def is_frozen(self) -> bool:
        """Whether a model was built from this config."""
        runtime = find_runtime(self)
        return runtime is not None and runtime.frozen

    def freeze(self) -> None:
        """Checks the current FP8 settings and freezes them. May be called again."""
        if not self.is_frozen:
            check_fp8_settings(self)
            runtime_of(self).frozen = True


def _own_fp8_format(config: TransformerConfig) -> str:
    """The recipe's name; assigning a recipe's name sets it, assigning 'hybrid' or 'e4m3' sets `fp8`."""
    return config.fp8_recipe


def _assign_fp8_format(config: TransformerConfig, value: str | None) -> None:
    name = DEFAULT_RECIPE if value is None else _checked_format(value)
    setattr(config, fp8_format_field(name), name)


def _checked_format(value: Any) -> str:
    check("fp8_format", plain(value), one_of(*RECIPES, *FP8_FORMATS))
    return str(plain(value))


class IterationEnd:
    """Megatron's `finalize_model_grads_func`, then the end of the FP8 iteration (amax, scales, health).

    A trainer assigns `config.finalize_model_grads_func` after the model was built, so the config wraps the function
    at every read. `function` None means that there is nothing to finalise.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self.function = function

    def __call__(self, model: list[Any], *args: Any, **kwargs: Any) -> Any:
        from ..iteration import finish_iteration  # lazy: iteration.py imports this package

        result = None if self.function is None else self.function(model, *args, **kwargs)
        finish_iteration(model)
        return result

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IterationEnd) and self.function == other.function

    def __hash__(self) -> int:
        return hash(self.function)


_FINALIZE = "finalize_model_grads_func"
"""A config field behind a property. Its value is in the config's __dict__, like any field's, so copies have it."""


def _finalize(config: TransformerConfig) -> Callable[..., Any] | None:
    function = vars(config).get(_FINALIZE)
    return None if function is None and not quantizes(config) else IterationEnd(function)


def _assign_finalize(config: TransformerConfig, function: Callable[..., Any] | None) -> None:
    # A value read from a config may be assigned to a config (dataclasses.replace does): never wrap twice.
    config.__dict__[_FINALIZE] = function.function if isinstance(function, IterationEnd) else function


def accept_fp8_format(generated_init: Callable[..., None]) -> Callable[..., None]:
    """Adds the keyword `fp8_format` to the dataclass's own __init__, and resolves it into the field it means."""

    @functools.wraps(generated_init)
    def init(self: TransformerConfig, *args: Any, fp8_format: str | None = None, **kwargs: Any) -> None:
        # With None as the default of both names, a conflict differs from a default.
        if fp8_format is not None:
            _merge_fp8_format(fp8_format, kwargs, switch_given=bool(args) or "fp8" in kwargs)
        if kwargs.get("fp8_recipe") is None:
            kwargs["fp8_recipe"] = DEFAULT_RECIPE
        generated_init(self, *args, **kwargs)

    signature = inspect.signature(generated_init)
    extra = inspect.Parameter(
        "fp8_format", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None"
    )
    init.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), extra]
    )
    return init


def _merge_fp8_format(fp8_format: str, kwargs: dict[str, Any], *, switch_given: bool) -> None:
    value = _checked_format(fp8_format)
    name = fp8_format_field(value)
    if name == "fp8_recipe" and not switch_given:
        raise ValueError(
            f"fp8_format={value!r} without fp8, which would train in BF16: give fp8='hybrid' or 'e4m3' (or fp8=None, to"
            " have FP8 off)."
        )
    other = plain(kwargs.get(name))
    if other is not None and other != value:
        meaning = {"fp8": "element formats", "fp8_recipe": "scaling recipe"}[name]
        raise ValueError(
            f"fp8_format={value!r} conflicts with {name}={other!r}: both name the {meaning}. Give one of "
            f"them (with dataclasses.replace, which passes every field, give {name})."
        )
    kwargs[name] = value


# Set after @dataclass so that the generated __init__ keeps Megatron's fields, defaults and order.
TransformerConfig.__init__ = accept_fp8_format(TransformerConfig.__init__)  # type: ignore[method-assign]
TransformerConfig.fp8_format = property(_own_fp8_format, _assign_fp8_format)
TransformerConfig.finalize_model_grads_func = property(_finalize, _assign_finalize)

_ALSO_FP8 = frozenset(
    {
        "first_last_layers_bf16",
        "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16",
        "moe_fp8_dispatch",
    }
)


def _is_fp8_setting(name: str) -> bool:
    return name.startswith(("fp8", "fp4")) or name in _ALSO_FP8


_REPLACED_FOR_CHECK = frozenset({"fp8_recipe", "first_last_layers_bf16"})


@contextmanager
def _fp8_versions_present() -> Iterator[None]:
    """Inside, Megatron-Core's config finds the Transformer Engine versions that it requires for FP8."""
    original = megatron_config.is_te_min_version

    def is_te_min_version(version: str, check_equality: bool = True) -> bool:
        return version in _FP8_TE_VERSIONS or original(version, check_equality)

    megatron_config.is_te_min_version = is_te_min_version
    try:
        yield
    finally:
        megatron_config.is_te_min_version = original


@patches.wrap(
    "transformer.transformer_config.TransformerConfig.__post_init__",
    "it asks for Transformer Engine's version where experts or recomputed norms run in FP8",
)
def check_without_te(original: Callable[[Any], None], self: Any) -> None:
    """Checks a config of Megatron-Core's class, or of another program's, without those versions.

    ValueError: as Megatron-Core's, and for a recipe's name in fp8; with the remedy.
    """
    if self.fp8:
        check("fp8", str(plain(self.fp8)).lower(), FIELD_RULES["fp8"])
    try:
        with _fp8_versions_present() if quantizes(self) else nullcontext():
            original(self)
    except ValueError as error:
        if not quantizes(self) or not str(error).startswith("Delayed scaling does not support"):
            raise
        raise ValueError(
            f"{str(error).strip()} megatron_fp8.TransformerConfig, which has the same fields, does; or take another"
            " fp8_recipe, such as 'tensorwise'."
        ) from error


@dataclass
class MLATransformerConfig(TransformerConfig, megatron_config.MLATransformerConfig):
    """Megatron-Core's `MLATransformerConfig` with FP8 that runs without Transformer Engine.

    DeepSeek-V2 and V3 compute attention through two low-rank projections. Hidden states are projected *down* to a latent
    of queries and one of keys and values (`linear_q_down_proj`, `linear_kv_down_proj`), and *up* to heads
    (`linear_q_up_proj`, `linear_kv_up_proj`): four FP8 linears in place of `linear_qkv`. A head's queries and keys have
    `qk_head_dim` channels without positions and `qk_pos_emb_head_dim` with rotary ones, and all heads share the latter
    for keys; a head's values have `v_head_dim` channels.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; the fields are Megatron-Core's.

    Raises:
        ValueError: as `TransformerConfig`; or a size of latent attention is out of range or does not fit the layout.
    """

    # Repeated with Megatron-Core's defaults for latent attention: a dataclass takes those of its first base.
    multi_latent_attention: bool = True
    """Compute attention through latents of queries, keys and values."""
    normalization: str = "RMSNorm"
    """The norm of the layers, 'RMSNorm' or 'LayerNorm'."""


MLATransformerConfig.__init__ = accept_fp8_format(MLATransformerConfig.__init__)  # type: ignore[method-assign]
