"""Patches for machines without Transformer Engine, a working apex or a compiler.

Megatron-Core reads some names of Transformer Engine without checking that it is installed. Its replacement of apex's
gradient norm reads one number a weight back to the host, and a large model has hundreds of weights.

It decorates some fifty functions with torch.compile (its jit_fuser), which on a CPU needs a C++ compiler at run time.
Decorating also imports torch's compiler, a quarter of a rank's start-up time. Setting TORCHDYNAMO_DISABLE works only
before the first import; torch.compiler.set_stance would disable all compilation in the process. So `plain_functions`
imports Megatron-Core without compiling, and if it was imported before, `without_compiler` restores its functions. This
affects Megatron-Core alone.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from packaging.version import Version

from ...files.terminal import warn_user
from .. import environment as compat
from .patching import ImportedNames, Patch, PatchList, loaded_megatron_modules

fusions = PatchList()
"""For all processes: each asks for what it lacks."""

without_te = PatchList()
"""For processes without Transformer Engine."""


@fusions.wrap(
    "transformer.transformer_config.TransformerConfig.__post_init__",
    "a fused kernel that is not installed ends the first forward with ModuleNotFoundError, or the config with an error",
)
def without_missing_fusions(original: Callable[[Any], None], self: Any) -> None:
    """Switches off, with a warning, fused kernels that this machine lacks: unfused operators differ in rounding alone."""
    for name, (without, needs) in compat.missing_fusions(self).items():
        warn_user(
            f"{name}={getattr(self, name)!r} needs {needs}, and this machine lacks it: {name}={without!r} is used, which"
            " computes the same, up to rounding"
        )
        setattr(self, name, without)
    original(self)


class _NoFp8State:
    """Replaces Transformer Engine's global FP8 state when a norm or an activation is recomputed."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """False: no GEMM runs inside a norm or an activation function."""
        return False


def _null_context(**kwargs: Any) -> AbstractContextManager[None]:
    return nullcontext()


_WHY = "recompute_modules=['layernorm'] and ['moe_act'] use Transformer Engine's name, FP8 or not"
without_te.replace("utils._te_version", Version("0.0"), "is_te_min_version() compares None: a TypeError")
without_te.replace(
    "transformer.moe.moe_utils.te_general_gemm",
    None,
    "the router asks `te_general_gemm is not None`, a name that only Transformer Engine defines",
    create=True,
)
without_te.replace("tensor_parallel.random.FP8GlobalStateManager", _NoFp8State, _WHY, create=True)
without_te.replace("tensor_parallel.random.fp8_autocast", _null_context, _WHY, create=True)
without_te.replace("tensor_parallel.random.activation_recompute_forward", _null_context, _WHY, create=True)


class _MissingTe:
    """Transformer Engine's modules for a spec: refused, since it is not installed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "this layer spec is of Transformer Engine's modules, and it is not installed: give the model"
            " megatron_fp8.mcore.spec.get_gpt_layer_fp8_spec(config), or Megatron-Core's local spec"
        )


without_te.replace(
    "models.gpt.gpt_layer_specs.TESpecProvider", _MissingTe, "its use ends in NameError", create=True
)


@without_te.wrap(
    "models.gpt.gpt_layer_specs.get_gpt_mtp_block_spec",
    "callers ask for Transformer Engine's projection whatever the layers are",
    everywhere=True,
)
def local_mtp_block_spec(
    original: Callable[..., Any],
    config: Any,
    spec: Any,
    use_transformer_engine: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The layers are the spec's, and their projection is not Transformer Engine's."""
    return original(config, spec, False, *args, **kwargs)


@without_te.wrap(
    "models.common.language_module.language_module.LanguageModule.__init__",
    "hybrid layers fail with the name of a missing class",
)
def refuse_hybrid_layers(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Refuses Mamba hybrids, in any precision."""
    if any(kind.__name__ == "MambaModel" for kind in type(self).__mro__):
        raise RuntimeError(
            "MambaModel needs Transformer Engine, which is not installed: Megatron-Core has no other layers and norms for"
            " Mamba hybrids"
        )
    original(self, *args, **kwargs)


without_te.replace(
    "transformer.multi_latent_attention.HAVE_TE",
    False,
    "it assumes that Transformer Engine is installed, and tests whether a layer is of the class None",
)


def on_cpu() -> PatchList:
    """Returns patches for apex without a GPU: Megatron-Core's own functions clip in place of CUDA kernels."""
    from megatron.core import utils

    patches = PatchList("megatron.core.optimizer")
    for module, names in {
        "clip_grads": ("multi_tensor_applier", "multi_tensor_scale_impl", "l2_norm_impl"),
        "optimizer": ("multi_tensor_applier", "multi_tensor_scale_impl"),
    }.items():
        for name in names:
            own = f"local_{name.removesuffix('_impl')}".replace("l2_norm", "multi_tensor_l2_norm")
            patches.replace(f"{module}.{name}", getattr(utils, own), "apex's kernels are for CUDA tensors")
    return patches


def on_gpu() -> PatchList:
    """Returns patches for the replacements that Megatron-Core selected at its import; none where it selected amp_C's."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    patches = PatchList("megatron.core.optimizer.clip_grads")
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        why = "the replacement for amp_C's norm reads a number back for each tensor"
        patches.replace("l2_norm_impl", norm_without_waiting, why)
    if clip_grads.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
        why = "the replacement for amp_C's scaling launches two kernels for each tensor"
        patches.wrap("multi_tensor_scale_impl", why)(scale_at_once)
    return patches


def norm_without_waiting(
    chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], per_tensor: bool, *args: Any
) -> tuple[torch.Tensor, None]:
    """Returns the 2-norm of all tensors of all lists as one vector: float32 [1], on ``noop_flag``'s device; amp_C's
    signature.

    NaN or Inf in any tensor makes it NaN or Inf.
    """
    tensors = [tensor for tensors in tensor_lists for tensor in tensors]
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
    # An offloaded optimizer's tensors are on the CPU.
    stacked = torch.stack([norm.to(noop_flag.device) for norm in norms])
    return torch.linalg.vector_norm(stacked).view(1), None


def scale_at_once(
    original: Any, chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], factor: Any
) -> None:
    """Scales tensors in place, as in clipping, in few launches; amp_C's signature."""
    sources, results = tensor_lists
    if all(a is b for a, b in zip(sources, results, strict=True)) and sources:
        torch._foreach_mul_(results, factor)
    else:
        original(chunk_size, noop_flag, tensor_lists, factor)


@contextmanager
def plain_functions() -> Iterator[None]:
    """Inside, functions that Megatron-Core defines are not compiled; torch.compile works for all others.

    Does nothing if Megatron-Core is already imported.
    """
    if "megatron.core" in sys.modules:
        yield
        return
    original = torch.compile

    def compile_others(model: Any = None, **options: Any) -> Any:
        if isinstance(model, types.FunctionType) and model.__module__.startswith("megatron.core."):
            return model
        return original(model, **options)

    torch.compile = compile_others
    try:
        yield
    finally:
        torch.compile = original
        # megatron.core.jit.jit_fuser, and modules that imported it.
        for module, name in ImportedNames().of(compile_others):
            setattr(module, name, original)


def without_compiler() -> list[Patch]:
    """Returns patches by which loaded functions that were compiled become their originals."""
    why = "torch.compile on a CPU needs a C++ compiler"
    found = [Patch("megatron.core.jit", "jit_fuser", _identity, why, everywhere=True)]
    for module in loaded_megatron_modules():
        for owner in [module, *_classes(module)]:
            path = module.__name__ if owner is module else f"{module.__name__}.{owner.__qualname__}"
            found += [
                Patch(path, name, value._torchdynamo_orig_callable, why)
                for name, value in vars(owner).items()
                if _is_compiled(value)
            ]
    return found


def _identity(function: Any) -> Any:
    return function


def _is_compiled(value: Any) -> bool:
    return (
        isinstance(value, types.FunctionType)
        and (value.__module__ or "").startswith("megatron.core.")
        and hasattr(value, "_torchdynamo_orig_callable")
    )


def _classes(module: types.ModuleType) -> list[type]:
    """Returns the classes that `module` itself defines at its top level."""
    return [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
