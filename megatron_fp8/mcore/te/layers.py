"""Transformer Engine's linears under this package's plan and report.

Megatron-Core's own wrappers do the construction, the communication and the checkpoints. This adds an entry in the
precision plan; BF16 where the plan says so, inside TE's FP8 context too; an error instead of BF16 where the plan says
FP8; and a check of TE's quantizers after the first FP8 forward. TE's ``_extra_state`` is not saved: it is a pickle of
delayed scaling's history, which restarts when training resumes.

Import this only if Transformer Engine is installed: its classes are the base classes here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from ...backends import transformer_engine as engine
from ...linear.amax_recorder import count_linear
from ...plan.autocast_state import Forwards, layer_being_built, runs_fp8
from ...recipe import DelayedScaling
from ..layers.attention import CoreAttention
from ..patches.patching import Patch, PatchSet
from ..sites import make_site
from .context import TeSite, recipe_of

_NOT_SAVED = (
    "delayed scaling's history is Transformer Engine's and is not in checkpoints: on a resume it starts anew"
)


class _TeSiteLinear:
    """The methods that all of TE's linears get."""

    config: Any
    training: bool
    is_expert = False  # config/fp8_checks.py refuses experts
    weight: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fp8_layer = layer_being_built()
        self._site: TeSite | None = None
        self._forwards = Forwards()

    def bind_fp8_site(self, site: TeSite) -> None:
        """Sets the site of the model's plan for this layer."""
        self._site = site
        if isinstance(site.plan.recipe, DelayedScaling):
            site.notes.add(_NOT_SAVED)

    @property
    def fp8_site(self) -> TeSite:
        """This layer's site; a layer outside any prepared model resolves its own."""
        if self._site is None:
            self.bind_fp8_site(make_site(self, type(self).__name__))
        assert self._site is not None
        return self._site

    def runs_fp8(self) -> bool:
        """Whether the next forward uses FP8."""
        return runs_fp8(self.fp8_site, self._forwards.state_for_call(self.fp8_site, self.training))

    def forward(self, x: torch.Tensor) -> Any:
        """As Megatron-Core's wrapper, in the plan's precision.

        Raises:
            RuntimeError: the plan says FP8 but TE's context is missing or has another recipe; or TE's quantizers
                differ from the recipe.
        """
        site, fp8 = self.fp8_site, self.runs_fp8()
        if not fp8:
            with engine.high_precision():
                out = super().forward(x)  # type: ignore[misc]
        else:
            self._require_context(site)
            out = super().forward(x)  # type: ignore[misc]
            self._check_quantizers(site)
        kind = "fp8_gemms" if fp8 else "hp_gemms"
        count_linear(site.state, x, self.weight, out[0], training=self.training, kind=kind)
        return out

    def _require_context(self, site: TeSite) -> None:
        if not engine.is_enabled():
            raise RuntimeError(
                f"{site.plan.name} is planned in FP8 and was called outside Transformer Engine's FP8 context, where it"
                " would run in BF16: run the model through Megatron-Core's transformer block after"
                " megatron_fp8.mcore.install(), or enter megatron_fp8.mcore.te.context.get_fp8_context(config)"
            )
        here, expected = engine.recipe_in_force(), recipe_of(self.config)
        if here is not expected and repr(here) != repr(expected):  # some modules hold a copy of the config
            raise RuntimeError(
                f"{site.plan.name} was called in a Transformer Engine context with another recipe"
                f" ({engine.one_line(here)}) than the config's ({engine.one_line(expected)})"
            )

    def _check_quantizers(self, site: TeSite) -> None:
        """Checks once: later forwards use the first one's quantizers."""
        if site.verified:
            return
        assert site.plan.recipe is not None
        wrong = engine.quantizer_differences(self, site.plan.recipe)
        if wrong:
            raise RuntimeError(
                f"{site.plan.name}: Transformer Engine {engine.version()} differs from {site.plan.recipe}:"
                f" {'; '.join(wrong)}. Use fp8_backend='native'"
            )
        site.verified = True

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's, without TE's pickle."""
        found = super().sharded_state_dict(*args, **kwargs)  # type: ignore[misc]
        return {key: value for key, value in found.items() if not key.endswith("_extra_state")}

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *args: Any
    ) -> None:
        pickled = f"{prefix}_extra_state"
        state_dict.pop(pickled, None)  # TE would unpickle it
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *args)  # type: ignore[misc]
        if pickled in missing:
            missing.remove(pickled)


class Fp8TeColumnParallelLinear(_TeSiteLinear, TEColumnParallelLinear):
    """Y = X A^T with A split by output features; arguments as Megatron-Core's TEColumnParallelLinear."""


class Fp8TeRowParallelLinear(_TeSiteLinear, TERowParallelLinear):
    """Y = X A^T with A split by input features; arguments as Megatron-Core's TERowParallelLinear."""


class Fp8TeLayerNormColumnParallelLinear(_TeSiteLinear, TELayerNormColumnParallelLinear):
    """Norm, then a column-parallel linear; arguments as Megatron-Core's TELayerNormColumnParallelLinear."""


class Fp8TeSpecProvider(TESpecProvider):
    """Transformer Engine's linears and norms, and this package's core attention, which is the same for all backends."""

    def column_parallel_linear(self) -> type:
        """Column-parallel linear."""
        return Fp8TeColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Row-parallel linear."""
        return Fp8TeRowParallelLinear

    def column_parallel_layer_norm_linear(self) -> type:
        """Norm and column-parallel linear in one."""
        return Fp8TeLayerNormColumnParallelLinear

    def core_attention(self) -> type:
        """Attention between the projections, in high precision."""
        return CoreAttention


def te_layer_spec(config: Any) -> ModuleSpec:
    """Megatron-Core's Transformer Engine spec of a dense GPT layer, with this file's classes."""
    with _own_classes():
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm, qk_l2_norm=config.qk_l2_norm
        )


def te_block_spec(config: Any, **options: Any) -> TransformerBlockSubmodules:
    """The same for all dense layers of a pipeline stage; ``options`` as for get_gpt_decoder_block_spec."""
    with _own_classes():
        return gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, **options)


@contextmanager
def _own_classes() -> Iterator[None]:
    why = "its Transformer Engine spec takes every class from TESpecProvider"
    owner = "megatron.core.models.gpt.gpt_layer_specs"
    provider = PatchSet([Patch(owner, "TESpecProvider", Fp8TeSpecProvider, why)])
    provider.apply()
    try:
        yield
    finally:
        provider.revert()
