"""The models that an optimizer steps; it skips a step by their health alone.

Megatron-Core passes the model's chunks to the function that makes each optimizer, and most optimizers do not store
them. So that function records them: on a rank without trainable parameters an optimizer cannot be identified by its
parameters, and must skip with the others, since the gradient norm is a collective. Any other optimizer is identified
by its parameters.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..patches.patching import Patch
from ..runtime import Fp8Runtime, living_runtimes, runtime_of, unwrap


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


def noted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps _get_megatron_optimizer_based_on_param_groups: records whose models the optimizer steps."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        for chunk in signature.bind(*args, **kwargs).arguments["model_chunks"]:
            config = getattr(unwrap(chunk), "config", None)
            if config is not None:  # else a user's module, without this package's FP8
                runtime_of(config).optimizers.add(optimizer)
        return optimizer

    return make


def patches() -> list[Patch]:
    """Returns the patch of the function that makes each of Megatron-Core's optimizers."""
    return [
        Patch(
            "megatron.core.optimizer",
            "_get_megatron_optimizer_based_on_param_groups",
            noted,
            "an optimizer skips the step if its own models cast NaN or Inf, and does not store its models",
            wrap=True,
        )
    ]
