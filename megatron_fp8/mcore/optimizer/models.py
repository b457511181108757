"""Which models an optimizer steps; it heeds their health alone.

Megatron-Core hands the model's chunks to the function that makes each optimizer, and most optimizers forget them. They
are noted there: on a rank where nothing is trained an optimizer has no parameters to be known by, and must skip with the
others, since the gradient norm is a collective. One that was made elsewhere is known by its parameters.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..patches.patching import Patch
from ..runtime import Fp8Runtime, living_runtimes, runtime_of, unwrap


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers of a chain; of a single one, itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def runtimes_stepped_by(optimizer: Any) -> list[Fp8Runtime]:
    """Those of the models that an optimizer, or any of a chain's, steps."""
    living, found = living_runtimes(), []
    for part in parts_of(optimizer):
        known = [runtime for runtime in living if part in runtime.optimizers]
        if not known and part.optimizer is not None:
            known = [runtime for runtime in living if runtime.is_stepped_by(part.optimizer)]
        found += [runtime for runtime in known if runtime not in found]
    return found


def noted(original: Callable[..., Any]) -> Callable[..., Any]:
    """_get_megatron_optimizer_based_on_param_groups, which notes whose models the optimizer steps."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        for chunk in signature.bind(*args, **kwargs).arguments["model_chunks"]:
            config = getattr(unwrap(chunk), "config", None)
            if config is not None:  # else it is a module of somebody's, without FP8 of this package
                runtime_of(config).optimizers.add(optimizer)
        return optimizer

    return make


def patches() -> list[Patch]:
    """The function that makes each of Megatron-Core's optimizers."""
    return [
        Patch(
            "megatron.core.optimizer",
            "_get_megatron_optimizer_based_on_param_groups",
            noted,
            "an optimizer skips the step where its own models' casts met NaN or Inf, and forgets which those are",
            wrap=True,
        )
    ]
