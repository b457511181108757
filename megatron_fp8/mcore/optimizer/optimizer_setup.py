"""Checks an optimizer's options, and records its models, when it is made.

An optimizer skips a step by the health of its own models alone. Megatron-Core passes the model's chunks to the
function that makes each optimizer, and most optimizers do not store them. So that function records them: on a rank
without trainable parameters an optimizer cannot be identified by its parameters, and must skip with the others, since
the gradient norm is a collective. Any other optimizer is identified by its parameters.

Options that do not work with FP8 parameters, or without CUDA, would fail during construction or in the first step, with a
misleading message, or are untested. They are refused, with the reason, before anything is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ...fp8_utils import has_fp8_params
from .. import environment as compat
from ..patches.patching import PatchList
from ..runtime import Fp8Runtime, living_runtimes, runtime_of, unwrap

patches = PatchList()


def parts_of(optimizer: Any) -> list[Any]:
    """Returns the optimizers of a chain; for a single optimizer itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def runtimes_stepped_by(optimizer: Any) -> list[Fp8Runtime]:
    """Returns the runtimes of the models that an optimizer, or any of a chain, steps."""
    living, found = living_runtimes(), []
    for part in parts_of(optimizer):
        of_part = [runtime for runtime in living if part in runtime.optimizers]
        if not of_part and part.optimizer is not None:
            of_part = [runtime for runtime in living if runtime.is_stepped_by(part.optimizer)]
        found += [runtime for runtime in of_part if runtime not in found]
    return found


def check_options(config: Any, model_chunks: list[Any]) -> None:
    """Raises ValueError for options that these models, or this machine, do not support.

    Args:
        config: Megatron-Core's OptimizerConfig.
        model_chunks: the models that it steps; only their configs are checked, so all ranks decide alike.
    """
    configs = [getattr(unwrap(chunk), "config", None) for chunk in model_chunks]
    fp8_params = any(c is not None and has_fp8_params(c) for c in configs)
    if config.optimizer_cpu_offload and not config.use_distributed_optimizer and (config.bf16 or config.fp16):
        raise ValueError(
            "optimizer_cpu_offload=True with use_distributed_optimizer=False: Megatron-Core's HybridDeviceOptimizer would"
            " step masters of its own, which it makes from the parameters (of FP8 parameters, from codes: Megatron-LM"
            " issue 5083), and its first step fails. Set use_distributed_optimizer=True here and in"
            " DistributedDataParallelConfig, or optimizer_cpu_offload=False"
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


@patches.wrap(
    "optimizer._get_megatron_optimizer_based_on_param_groups",
    "an optimizer skips the step if its own models cast NaN or Inf, and does not store its models; unsupported"
    " options fail in a step, with a misleading message",
)
def check_and_record(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Makes an optimizer: checks its options, and records whose models it steps."""
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    chunks = arguments["model_chunks"]
    check_options(arguments["config"], chunks)
    optimizer = original(*args, **kwargs)
    for chunk in chunks:
        config = getattr(unwrap(chunk), "config", None)
        if config is not None:  # else a user's module, without this package's FP8
            runtime_of(config).optimizers.add(optimizer)
    return optimizer
