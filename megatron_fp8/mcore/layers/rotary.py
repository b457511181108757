"""A KV cache of rotated keys: each key is rotated once, when its token arrives.

Megatron-Core's static cache holds unrotated keys, and rotates all of them again for every decoded token: with 8
sequences of 257 tokens that took longer than a layer's attention and norms together. A rotation depends on one token
and its position alone, so the keys have the same bytes either way.

Rejected: Megatron-Core's ``flash_decode``, whose cache holds rotated keys too: it needs flash attention and a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)

from ..patches.patching import Patch


class RotatedKeys(StaticInferenceContext):
    """Megatron-Core's static context; layers store rotated keys in it."""


def rotated_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Attention._adjust_key_value_for_inference: rotates new keys before a RotatedKeys context stores them."""

    @functools.wraps(original)
    def adjusted(
        self: Any,
        inference_context: Any,
        query: Any,
        key: Any,
        value: Any,
        rotary_pos_emb: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if rotary_pos_emb is None or not isinstance(inference_context, RotatedKeys):
            return original(self, inference_context, query, key, value, rotary_pos_emb, *args, **kwargs)
        start = inference_context.sequence_len_offset
        key = apply_rotary_pos_emb(
            key,  # [tokens, b, groups, d]
            rotary_pos_emb[1][start : start + len(key)],
            config=self.config,
            mscale=_yarn_get_concentration_factor_from_config(self.config),
            cp_group=self.pg_collection.cp,
        )
        query, key, value, (of_queries, _), *rest = original(
            self, inference_context, query, key, value, rotary_pos_emb, *args, **kwargs
        )
        return query, key, value, (of_queries, None), *rest

    return adjusted


def patches() -> list[Patch]:
    """Returns the patches for a cache of rotated keys."""
    return [
        Patch(
            "megatron.core.transformer.attention.Attention",
            "_adjust_key_value_for_inference",
            rotated_once,
            "every token decoded would rotate the keys of all tokens again",
            wrap=True,
        )
    ]
