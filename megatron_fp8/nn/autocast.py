"""fp8_autocast: overrides a converted model's precision or recipe for a region of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..plan.autocast_state import autocast_context, current_autocast_state
from ..recipe import Recipe
from .config import Fp8Config


@contextmanager
def fp8_autocast(enabled: bool = True, recipe: Recipe | str | None = None) -> Iterator[None]:
    """Sets the precision and recipe of converted linears called inside. Also a decorator.

    A converted model runs in FP8 without it. Regions nest: ``enabled=True`` re-enables FP8 inside a disabled
    region, and a recipe of None keeps the outer region's recipe. Layers that were not converted never run in
    FP8. Leaving a region does nothing: ``fp8_step`` updates the scales, once an iteration.

    Args:
        enabled: False runs converted linears in their own dtype, with nn.Linear's results.
        recipe: replaces the model's recipe, by name or as an instance. Its delayed scaling, if any, has its
            own history.

    Recomputation by torch.utils.checkpoint uses the settings of its forward, even outside the region.

    Raises:
        ValueError: the recipe is unknown.
    """
    if not isinstance(enabled, bool):
        raise ValueError(
            f"fp8_autocast(enabled={enabled!r}): use True or False; a recipe goes into recipe=..."
        )
    autocast = current_autocast_state()
    if recipe is not None:
        autocast = autocast.with_recipe(Fp8Config(recipe=recipe).resolved_recipe)
    on = autocast._replace(off="none", reason="")
    with autocast_context(
        on if enabled else autocast._replace(off="all", reason="fp8_autocast(enabled=False)")
    ):
        yield
