"""FP8 contexts and plan entries for Transformer Engine's layers.

Megatron-Core enters the context once around all layers with delayed scaling, else around each layer. TE updates delayed
scales when its outermost context is left, so entering it once a layer would be wrong. Layers that stay in BF16 leave the
context during their call (te/layers.py), so they work with delayed scaling, which Megatron-Core refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron.core import parallel_state

from ... import fp8_utils
from ...backends import choose_backend
from ...backends import transformer_engine as engine
from ...numerics.formats import ROLES
from ...plan.autocast_state import current_autocast_state
from ...plan.site_plan import SitePlan
from ...quantizer import Casts
from ...state.collectives import own_device
from ...state.fp8_state import Fp8State
from .. import environment as compat
from ..config.fp8_checks import wants_te
from ..runtime import runtime_of


def get_fp8_context(config: Any, layer_no: int = -1, is_init: bool = False) -> AbstractContextManager[None]:
    """fp8_utils.get_fp8_context, and inside it Transformer Engine's if the config requests TE's layers.

    Building a layer fixes its precision, and later changes of settings would affect only later layers. So building
    freezes the settings, and copies of the config share its state from then on.
    """
    if is_init and hasattr(config, "freeze"):
        config.freeze()
    ours = fp8_utils.get_fp8_context(config, layer_no, is_init)
    return _nested_contexts(ours, config) if not is_init and _has_te_layers(config) else ours


def choose_te_layers(config: Any) -> bool:
    """Whether a model of this config has Transformer Engine's layers: requested, and able to run.

    Raises:
        ValueError: requested, and not able to run; with fp8_fallback='warn' each site warns instead.
    """
    chosen = wants_te(config)
    if chosen:
        try:
            choose_backend(engine.name, own_device(), fp8_utils.get_fp8_recipe(config), layers=True)
        except ValueError:
            if config.fp8_fallback != "warn":
                raise
            chosen = False
        runtime_of(config).te_layers = chosen
    return chosen


def _has_te_layers(config: Any) -> bool:
    if not wants_te(config):
        return False
    chosen = runtime_of(config).te_layers
    return choose_te_layers(config) if chosen is None else chosen


@contextmanager
def _nested_contexts(ours: AbstractContextManager[None], config: Any) -> Iterator[None]:
    with ours:
        if current_autocast_state().off != "none":
            yield
            return
        with engine.autocast(recipe_of(config), amax_group(config)):
            yield


def recipe_of(config: Any) -> Any:
    """Returns TE's recipe object of this config, made once."""
    runtime = runtime_of(config)
    if runtime.te_recipe is None:
        runtime.te_recipe = engine.te_recipe(fp8_utils.get_fp8_recipe(config))
    return runtime.te_recipe


def amax_group(config: Any) -> Any:
    """Returns the group that reduces delayed scaling's amaxes; None without model parallelism."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    return compat.amax_group(config, expert=False)


def checkpoint(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Megatron's te_checkpoint: inside a TE context TE's own, which restores the context, else ``ours``."""

    def te_checkpoint(*args: Any, **kwargs: Any) -> Any:
        return (theirs if engine.is_enabled() else ours)(*args, **kwargs)

    return te_checkpoint


@dataclass
class TeSite:
    """The attributes of a site (site.GemmSite) that reports, checkpoints and iterations read, for a layer that does
    its own casts.

    Attributes:
        plan: the site's entry.
        state: the model's FP8 state: its iteration and counts. There are no slots: TE does not expose amaxes and health.
        notes: for the report, made while it ran.
        verified: whether TE's quantizers were checked against the recipe.
        quantizers, casts: none, for every role.
        heals: whether a healing phase takes it out of FP8; its settings refuse one.
    """

    plan: SitePlan
    state: Fp8State
    notes: set[str] = field(default_factory=set)
    verified: bool = False
    heals: bool = True
    quantizers: dict[str, None] = field(default_factory=lambda: dict.fromkeys(ROLES))
    casts: dict[str, Casts] = field(default_factory=lambda: {role: Casts(None, None) for role in ROLES})

    @property
    def is_fp8(self) -> bool:
        """Whether this site is planned in FP8."""
        return self.plan.precision == "fp8"
