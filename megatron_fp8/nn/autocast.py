"""fp8_autocast: another precision for a region of code than the converted model has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..plan.switch import current_switch, switched
from ..recipe import Recipe
from .config import Fp8Config


@contextmanager
def fp8_autocast(enabled: bool = True, recipe: Recipe | str | None = None) -> Iterator[None]:
    """Linears of converted models called inside run in FP8 or not, and by which recipe. Also a decorator.

    A converted model runs in FP8 without it. Inside another region the inner one decides: ``enabled=True`` switches on
    again what an outer one switched off, and a recipe of None keeps the outer one's. Layers that were not converted are
    never switched on. Leaving a region does nothing: scales are updated by ``fp8_step``, once an iteration.

    Args:
        enabled: False runs converted linears in their own dtype, with nn.Linear's numbers.
        recipe: another recipe than the model's, by name or as an instance. Its delayed scaling, if it has one, keeps
            a history of its own.

    Recomputation by torch.utils.checkpoint runs as its forward ran, also where that region has been left.

    Raises:
        ValueError: the recipe is unknown.
    """
    if not isinstance(enabled, bool):
        raise ValueError(
            f"fp8_autocast(enabled={enabled!r}): use True or False; a recipe goes into recipe=..."
        )
    here = current_switch()
    if recipe is not None:
        here = here.with_recipe(Fp8Config(recipe=recipe).resolved_recipe)
    on = here._replace(off="none", reason="")
    with switched(on if enabled else here._replace(off="all", reason="fp8_autocast(enabled=False)")):
        yield
