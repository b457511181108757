"""Patches for training with Megatron-Core on a machine without CUDA, over gloo.

Not a TorchFunctionMode: that is off inside backward() and in other threads. Without each patch, some lines of
Megatron-Core 0.16.1 fail, or silently corrupt data.
"""

from __future__ import annotations

import importlib
import types
from functools import cache
from typing import Any

import torch
from torch.utils._device import _device_constructors

from . import apex
from . import cpu_stubs as cpu
from .patching import Patch, loaded_megatron_modules

# Imported before the list is made, so that it includes every function they compile and every name they import.
_MODULES = (
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.moe.token_dispatcher",
)


@cache  # torch's list of operators takes 20 ms
def factories() -> dict[str, tuple[str, ...]]:
    """Returns module -> names of the functions of this torch version that make tensors on a ``device``."""
    taking_device = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and any(a.name == "device" for a in schema.arguments)
    }
    # From torch's own device context, since asarray has no schema. The call also fills torch's cache: filled after the
    # patches, it would hold the patched functions, and `with torch.device(...)` would do nothing.
    own = {f.__name__ for f in _device_constructors()}
    return {
        "torch": tuple(
            name
            for name in sorted(taking_device | own)
            if not name.startswith("_") and isinstance(getattr(torch, name, None), types.BuiltinFunctionType)
        ),
        "torch.fft": tuple(name for name in ("fftfreq", "rfftfreq") if hasattr(torch.fft, name)),
        "torch.nested": ("nested_tensor", "as_nested_tensor"),
        "torch.Tensor": tuple(sorted(name for name in dir(torch.Tensor) if name.startswith("new_"))),
    }


def patches() -> list[Patch]:
    """Returns all engine patches, for this process's loaded Megatron-Core. Imports Megatron-Core."""
    for module in _MODULES:
        importlib.import_module(module)
    return [*_device(), *_rng(), *_collectives(), *_moe(), *_eager(), *apex.cpu_patches()]


def _device() -> list[Patch]:
    """Devices, streams and tensors 'on cuda'."""
    why = "Megatron-Core asks torch.cuda, which raises on a machine without CUDA"
    return [
        Patch("torch.cuda", "current_device", cpu.current_device, why),
        Patch("torch.cuda", "set_device", cpu.set_device, why),
        Patch("torch.cuda", "synchronize", cpu.synchronize, why),
        Patch("torch.cuda", "empty_cache", cpu.empty_cache, why),
        Patch("torch.cuda", "Stream", cpu.CpuStream, why),
        Patch("torch.cuda", "Event", cpu.CpuEvent, why),
        Patch("torch.cuda", "current_stream", cpu.current_stream, why),
        Patch("torch.cuda", "default_stream", cpu.current_stream, why),
        Patch("torch.cuda", "stream", cpu.stream_context, why),
        Patch("torch.cuda", "set_stream", cpu.set_stream, why),
        *(
            Patch(
                "torch.cuda.nvtx",
                name,
                cpu.no_range,
                "a torch without CUDA has no NVTX",
                wrap=True,
                everywhere=True,
            )
            for name in ("range_push", "range_pop", "range_start", "range_end", "mark")
        ),
        *(
            Patch(owner, name, cpu.cpu_factory, "Megatron-Core makes tensors with device='cuda'", wrap=True)
            for owner, names in factories().items()
            for name in names
        ),
        Patch(
            "torch.utils._device.DeviceContext",
            "__init__",
            cpu.cpu_device_context,
            "`with torch.device('cuda')` makes tensors on the GPU",
            wrap=True,
        ),
        Patch(
            "torch.Tensor", "cuda", cpu.tensor_cuda, "tied embeddings and checkpoints move tensors to the GPU"
        ),
        Patch("torch.Tensor", "to", cpu.tensor_to, "Megatron-Core moves tensors to the GPU", wrap=True),
        Patch("torch.Tensor", "pin_memory", cpu.tensor_pin_memory, "pinning needs CUDA's driver"),
        Patch(
            "torch.Tensor",
            "type",
            cpu.tensor_type,
            "the optimizer sorts parameters by 'torch.cuda.*'",
            wrap=True,
        ),
    ]


def _rng() -> list[Patch]:
    """Patches that use the CPU's generator in place of the GPU's, so that dropout and recompute see the same numbers."""
    why = "tensor-parallel random streams are states of the GPU's generator"
    return [
        Patch("torch.cuda", "get_rng_state", cpu.get_rng_state, why),
        Patch("torch.cuda", "set_rng_state", cpu.set_rng_state, why),
        Patch("torch.cuda", "manual_seed", cpu.manual_seed, why),
        Patch(
            "megatron.core.tensor_parallel.random",
            "_get_cuda_rng_state",
            cpu.get_rng_state,
            why,
            everywhere=True,
        ),
        Patch(
            "megatron.core.tensor_parallel.random",
            "_set_cuda_rng_state",
            cpu.set_rng_state,
            why,
            everywhere=True,
        ),
        Patch("megatron.core.tensor_parallel.random.CudaRNGStatesTracker", "fork", cpu.fork, why),
    ]


def _collectives() -> list[Patch]:
    return [
        Patch(
            "megatron.core.distributed.param_and_grad_buffer",
            "dist_all_gather_func",
            cpu.gather_as_bytes,
            "gloo coalesces gathers of different dtypes into the first one's: silent corruption",
            wrap=True,
        )
    ]


def _moe() -> list[Patch]:
    return [
        Patch(
            "megatron.core.transformer.moe.moe_utils",
            "maybe_move_tensor_to_cpu",
            cpu.stay_on_cpu,
            "on a CPU tensor it skips the conversion to numpy that the all-to-all's split sizes need",
            everywhere=True,
        )
    ]


def _eager() -> list[Patch]:
    """Megatron-Core's jit_fuser is torch.compile, which on a CPU needs a C++ compiler at run time.

    Setting TORCHDYNAMO_DISABLE works only before the first import; torch.compiler.set_stance would disable all
    compilation in the process. So the decorator becomes the identity, and functions that it already compiled become
    their originals: this affects Megatron-Core alone, whenever it was imported.
    """
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
