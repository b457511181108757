"""Refuses optimizer options that do not work with FP8 parameters, or without CUDA.

They would fail during construction or in the first step, with a misleading message, or are untested. Here they are
refused, with the reason, before anything is made.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from .. import environment as compat
from ..patches.patching import Patch
from ..runtime import unwrap


def checked(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps _get_megatron_optimizer_based_on_param_groups: checks its config first."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        check_options(arguments["config"], arguments["model_chunks"])
        return original(*args, **kwargs)

    return make


def check_options(config: Any, model_chunks: list[Any]) -> None:
    """Raises ValueError for options that these models, or this machine, do not support.

    Args:
        config: Megatron-Core's OptimizerConfig.
        model_chunks: the models that it steps; only their configs are checked, so all ranks decide alike.
    """
    configs = [getattr(unwrap(chunk), "config", None) for chunk in model_chunks]
    fp8_params = any(getattr(c, "fp8", None) and getattr(c, "fp8_param", False) for c in configs)
    if config.optimizer_cpu_offload and fp8_params:
        raise ValueError(
            "optimizer_cpu_offload=True with fp8_param=True: Megatron-Core's HybridDeviceOptimizer makes its own masters"
            " from the parameters, and those hold codes (Megatron-LM issue 5083). Set fp8_param=False, or"
            " optimizer_cpu_offload=False; use_distributed_optimizer=True divides masters and moments over ranks"
        )
    if config.optimizer_cpu_offload and not compat.has_cuda():
        raise ValueError(
            "optimizer_cpu_offload=True moves masters and moments from a GPU to the CPU, and there is no GPU here: set it"
            " to False"
        )
    if fp8_params and config.use_precision_aware_optimizer:
        raise ValueError(
            "use_precision_aware_optimizer=True with fp8_param=True was never tried: Transformer Engine's FusedAdam would"
            " step the masters of FP8 weights, whatever main_params_dtype is, and no machine has run that. Set"
            " use_precision_aware_optimizer=False, or fp8_param=False"
        )


def patches() -> list[Patch]:
    """Returns the patch of the function that makes each of Megatron-Core's optimizers."""
    return [
        Patch(
            "megatron.core.optimizer",
            "_get_megatron_optimizer_based_on_param_groups",
            checked,
            "unsupported options fail in a step, with a misleading message",
            wrap=True,
        )
    ]
