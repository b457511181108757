"""Transformer Engine's linears as a backend, configured and checked by this package.

The other backends get a matrix and a rule. Transformer Engine (TE) runs a whole layer: casts, GEMMs, communication and
the amax history are its own, configured by a recipe object given to its autocast. So this backend has no ``quantize``
and no ``gemm``. ``te_recipe`` translates a recipe into TE's, and ``quantizer_differences`` compares the quantizers that
TE made for a layer with the recipe.

Both are needed, because TE silently ignores settings that it does not know. Its recipes are pydantic dataclasses, which
ignore unknown keywords: ``DelayedScaling(override_linear_precision=...)``, Megatron-Core's request for a weight gradient
in BF16, and ``interval=...``. Keywords that it knows may have no effect either: ``use_power_2_scales`` and
``use_f32_scales`` are fields, but quantizers read three QParams, which are attributes of the class, computed from an
environment variable when it was defined. Here those are set on the recipe object itself, and everything is read back.

Rejected: setting the environment variables. They count only before TE is imported, and for the whole process.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module, metadata, util
from typing import Any

import torch
from packaging.version import Version

from ..numerics.formats import ROLES
from ..recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Products,
    Recipe,
    recipe_name,
)

name = "transformer_engine"

MINIMUM = "2.9"
INSTALL = "pip install --no-build-isolation 'megatron_fp8[te]'"
NEEDS = (
    "Linux and a CUDA build of torch; where no wheel fits that torch it is compiled, with the CUDA toolkit's nvcc, cuDNN"
    " 9.3 or newer, and ninja"
)


def unavailable_reason() -> str | None:
    """Why Transformer Engine cannot be used in this process, with the install line; None if it can."""
    if util.find_spec("transformer_engine") is None:
        return f"Transformer Engine is not installed: {INSTALL}"
    if (reason := import_failure()) is not None:
        return reason
    if Version(version()) < Version(MINIMUM):
        return f"Transformer Engine {version()} is installed, {MINIMUM} or newer is needed: {INSTALL}"
    return None


@functools.cache
def import_failure() -> str | None:
    """Why a Transformer Engine that is installed cannot be imported, with the install line; None if it can."""
    try:
        import_module("transformer_engine.pytorch")
    except Exception as error:  # a missing library is an OSError, the wheel without one a RuntimeError
        first = str(error).partition("\n")[0]
        return f"Transformer Engine is installed and does not import ({type(error).__name__}: {first}): {INSTALL}"
    return None


def version() -> str:
    """The installed Transformer Engine's version, which Megatron-Core checks too."""
    found = getattr(import_module("transformer_engine"), "__version__", None)
    return str(found) if found is not None else metadata.version("transformer-engine")


def supports(device: torch.device, recipe: Recipe | Products | None = None) -> str | None:
    """Why TE's linears cannot run on the device, or not this recipe; None if they can. TE is asked about the GPU."""
    reason = unavailable_reason() or device_reason(device)
    if reason is not None or recipe is None:
        return reason
    if isinstance(recipe, Mapping):
        return "Transformer Engine's context has one recipe for all GEMMs"
    return unsupported_part(recipe) or _refusal_of_te(recipe)


def notes(device: torch.device, recipe: Recipe | Products) -> list[str]:
    """A note: TE specifies its casts and GEMMs, so its numbers differ from this package's."""
    return [f"Transformer Engine {version()} casts and multiplies"]


def device_reason(device: torch.device) -> str | None:
    """Why TE does not support the device; None if it may."""
    return None if device.type == "cuda" else f"Transformer Engine needs a CUDA device, this is {device}"


def unsupported_part(recipe: Recipe) -> str | None:
    """The part of a recipe that TE does not support; None if it supports all. Needs no Transformer Engine."""
    if isinstance(recipe, CustomRecipe):
        return (
            "Transformer Engine's custom recipes are made of its own quantizers, not of this package's rules"
        )
    if isinstance(recipe, NVFP4BlockScaling):
        return "NVFP4 by Transformer Engine is not in this release"
    if not isinstance(recipe, (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)):
        known = "delayed, tensorwise, blockwise, mxfp8"
        return f"Transformer Engine has no {recipe_name(recipe)} recipe (its recipes: {known})"
    if recipe.stochastic_rounding:
        return "Transformer Engine does not round FP8 stochastically"
    if isinstance(recipe, DelayedScaling):
        if recipe.amax_epsilon:
            return f"Transformer Engine's delayed scaling has no amax epsilon ({recipe.amax_epsilon})"
        if recipe.interval != 1:
            return f"Transformer Engine updates delayed scales every iteration, not every {recipe.interval}"
    if isinstance(recipe, Float8CurrentScaling) and recipe.margin:
        return f"Transformer Engine's tensorwise scaling has no margin ({recipe.margin})"
    return None


def _refusal_of_te(recipe: Recipe) -> str | None:
    engine = import_module("transformer_engine.pytorch")
    asked = {MXFP8BlockScaling: "is_mxfp8_available", Float8BlockScaling: "is_fp8_block_scaling_available"}
    possible, reason = getattr(engine, asked.get(type(recipe), "is_fp8_available"))(return_reason=True)
    return None if possible else f"Transformer Engine {version()}: {reason}"


# ------------------------------------------------------------------------------------------------------------- mapping

# Fields that a version may lack, with the feature that they enable; their value means "off".
_MAY_BE_ABSENT = {"backward_override": None, "enable_2d_quantization": False}

_made: dict[str, Recipe] = {}


def te_recipe(recipe: Recipe) -> Any:
    """TE's recipe object for ``recipe``, with every setting read back and compared.

    Raises:
        ValueError: TE does not support it (``unsupported_part``), or another recipe that TE cannot distinguish is in use.
        RuntimeError: the installed TE ignored a setting.
    """
    reason = unsupported_part(recipe)
    if reason is not None:
        raise ValueError(f"{reason}: use fp8_backend='native'")
    classes = import_module("transformer_engine.common.recipe")
    kind, wanted = _settings(recipe, classes)
    fields = {field.name for field in dataclasses.fields(kind)}
    made = kind(**{key: value for key, value in wanted.items() if key in fields})
    for key, value in wanted.items():
        if key not in fields and hasattr(made, key):
            setattr(made, key, value)  # an attribute of the class: no keyword reaches it
        found = getattr(made, key, _MAY_BE_ABSENT.get(key, "absent"))
        if found != value:
            raise RuntimeError(
                f"Transformer Engine {version()} did not take {key}={one_line(value)} for {kind.__name__}: it has"
                f" {one_line(found)}."
                " Use fp8_backend='native', or another version of Transformer Engine"
            )
    _refuse_twin(recipe, made)
    return made


def _settings(recipe: Recipe, classes: Any) -> tuple[type, dict[str, Any]]:
    """TE's class for a recipe, and all settings that determine its behaviour, TE's defaults included."""
    wanted: dict[str, Any] = {
        "fp8_format": classes.Format[recipe.fp8_format.name],  # type: ignore[attr-defined]
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,  # its default is an environment variable
    }
    if isinstance(recipe, DelayedScaling):
        return classes.DelayedScaling, wanted | {
            "margin": recipe.margin,
            "amax_history_len": recipe.amax_history_len,
            "amax_compute_algo": recipe.amax_compute_algo,
            "scaling_factor_compute_algo": None,
            "reduce_amax": True,
        }
    if isinstance(recipe, Float8CurrentScaling):
        pow2 = recipe.use_power_2_scales
        return classes.Float8CurrentScaling, {
            **wanted,
            "use_power_2_scales": pow2,
            **_quantizer_settings(classes, pow2, recipe.amax_epsilon),
            "fp8_gemm_fprop": classes.MMParams(use_split_accumulator=False),
            "fp8_gemm_dgrad": classes.MMParams(use_split_accumulator=True),
            "fp8_gemm_wgrad": classes.MMParams(use_split_accumulator=True),
        }
    if isinstance(recipe, Float8BlockScaling):
        return classes.Float8BlockScaling, {
            **wanted,
            "use_f32_scales": recipe.use_f32_scales,
            **_quantizer_settings(classes, not recipe.use_f32_scales, recipe.amax_epsilon),
            "x_block_scaling_dim": 1,
            "w_block_scaling_dim": 2,
            "grad_block_scaling_dim": 1,
        }
    assert isinstance(recipe, MXFP8BlockScaling)
    return classes.MXFP8BlockScaling, wanted | {"margin": 0, "enable_2d_quantization": False}


def _quantizer_settings(classes: Any, pow2: bool, epsilon: float) -> dict[str, Any]:
    asked = classes.QParams(power_2_scale=pow2, amax_epsilon=epsilon)
    if (asked.power_2_scale, asked.amax_epsilon) != (pow2, epsilon):
        raise RuntimeError(
            f"Transformer Engine {version()} made {one_line(asked)} of power_2_scale={pow2}, {epsilon}"
        )
    return dict.fromkeys(("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"), asked)


def one_line(value: Any) -> str:
    """A value of TE's for a message: recipes and their parts print several lines."""
    return " ".join(str(value).split())


def _refuse_twin(recipe: Recipe, made: Any) -> None:
    """TE stores delayed scaling's amaxes by the recipe's repr, which lacks the amax algorithm."""
    other = _made.setdefault(repr(made), recipe)
    if other != recipe:
        raise ValueError(
            f"{recipe} and {other}, in use in this process already, are one to Transformer Engine, which would mix their"
            " amaxes: it tells recipes apart by what they print, and that leaves the difference out. Use one of them"
        )


# ------------------------------------------------------------------------------------------------------------- running


def autocast(recipe: Any, group: Any) -> AbstractContextManager[Any]:
    """TE's context for FP8 by this TE recipe; ``group`` shares delayed scaling's amaxes."""
    engine = import_module("transformer_engine.pytorch")
    return engine.autocast(enabled=True, recipe=recipe, amax_reduction_group=group)


def high_precision() -> AbstractContextManager[Any]:
    """A context in which TE's layers run in their own dtype, even inside an FP8 context."""
    return (
        import_module("transformer_engine.pytorch").autocast(enabled=False) if is_enabled() else nullcontext()
    )


def is_enabled() -> bool:
    """Whether TE's layers would run FP8 here."""
    return bool(_state_manager().is_fp8_enabled())


def recipe_in_force() -> Any:
    """The recipe object of the innermost of TE's contexts."""
    return _state_manager().get_fp8_recipe()


def _state_manager() -> Any:
    return import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager


# Where a linear keeps its quantizers: of one GEMM's input, weight and output, and of its output's gradient.
_PLACES = {"input": ("scaling_fwd", 0), "weight": ("scaling_fwd", 1), "grad_output": ("scaling_bwd", 0)}
_QUANTIZERS = {
    "delayed": "Float8Quantizer",
    "tensorwise": "Float8CurrentScalingQuantizer",
    "blockwise": "Float8BlockQuantizer",
    "mxfp8": "MXFP8Quantizer",
}


def quantizer_differences(linear: Any, recipe: Recipe) -> list[str]:
    """Differences between the quantizers that TE made for a linear and the recipe; empty if there are none.

    Call it after the linear's first FP8 forward, which makes them.
    """
    found = []
    for role in ROLES:
        key, index = _PLACES[role]
        quantizer = linear.quantizers[key][index]
        for what, (wanted, has) in _compare(recipe, role, quantizer).items():
            if has != wanted:
                found.append(f"{role}: {what} is {has!r}, asked for was {wanted!r}")
    if isinstance(recipe, DelayedScaling):
        for key in ("scaling_fwd", "scaling_bwd"):
            state = linear.fp8_meta[key]
            if state.amax_history.shape[0] != recipe.amax_history_len:
                found.append(
                    f"{key}: history of {state.amax_history.shape[0]}, not {recipe.amax_history_len}"
                )
    return found


def _compare(recipe: Recipe, role: str, quantizer: Any) -> dict[str, tuple[Any, Any]]:
    """Setting -> (the recipe's value, the quantizer's value)."""
    rule = recipe.rule(role)
    assert rule is not None, "a recipe that maps quantizes every role"
    kind = recipe_name(recipe)
    compared: dict[str, tuple[Any, Any]] = {
        "quantizer": (_QUANTIZERS[kind], type(quantizer).__name__),
        "format": (f"kFloat8{rule.fmt.name.upper()}", quantizer.dtype.name),
    }
    if kind in ("tensorwise", "blockwise"):
        compared["power-of-two scale"] = rule.scale == "pow2", bool(quantizer.force_pow_2_scales)
        compared["amax epsilon"] = rule.epsilon, quantizer.amax_epsilon
    if kind == "blockwise":
        wanted = 2 if rule.granularity.symmetric else 1
        compared["dimensions of a block"] = wanted, quantizer.block_scaling_dim
    return compared


def try_linear(recipe: Recipe, device: torch.device) -> tuple[float, list[str]]:
    """Runs one of TE's linears. Returns (relative root mean square error against the unquantized float64 product; the
    result of ``quantizer_differences``). Normal numbers in E4M3 give 3 to 4 %."""
    engine = import_module("transformer_engine.pytorch")
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(128, 256, generator=generator, dtype=torch.float32, device="cpu").to(
            device, torch.bfloat16
        )
        for _ in range(2)
    )
    linear = engine.Linear(
        in_features=256, out_features=128, bias=False, params_dtype=torch.bfloat16, device=str(device)
    )
    with torch.no_grad():
        linear.weight.copy_(weight)
    with autocast(te_recipe(recipe), None):
        found = linear(x).double()
    exact = x.double() @ weight.double().t()
    return ((found - exact).norm() / exact.norm()).item(), quantizer_differences(linear, recipe)
