"""A cache keeps rotated keys: new ones alone are rotated, and nobody rotates them again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from benchmarks.support.compare import assert_same_bytes
from benchmarks.support.gpt import gpt_config
from megatron_fp8.mcore.layers.attention import RotatedKeys, rotate_once

SEEN, NEW = 5, 3


def adjusted(context: Any, rotary: Any) -> tuple[Any, ...]:
    """What Megatron-Core's method got (the key), and what it gave (the embeddings)."""
    attention = SimpleNamespace(config=gpt_config(None), pg_collection=SimpleNamespace(cp=object()))
    got = []

    def original(self, context, query, key, value, rotary, *more):
        got.append(key)
        return query, key, value, rotary, "mask", more

    query = torch.randn(NEW, 2, 4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    _, _, _, rotary, mask, more = rotate_once(original, attention, context, query, query, query, rotary, 7)
    assert (mask, more) == ("mask", (7,))
    return got[0], rotary, query


def test_new_keys_are_rotated_by_their_positions():
    context = RotatedKeys(2, SEEN + NEW)
    context.sequence_len_offset = SEEN
    freqs = torch.randn(SEEN + NEW, 1, 1, 16, generator=torch.Generator().manual_seed(2))
    kept, (of_queries, of_keys), key = adjusted(context, (freqs, freqs))
    assert of_queries is freqs and of_keys is None
    everything = _apply_rotary_pos_emb_bshd(torch.cat([key[:1].expand(SEEN, -1, -1, -1), key]), freqs)
    assert_same_bytes(kept, everything[SEEN:])


def test_other_contexts_and_models_without_rotation_are_left_alone():
    freqs = torch.randn(SEEN + NEW, 1, 1, 16)
    for context, rotary in ((StaticInferenceContext(2, 8), (freqs, freqs)), (RotatedKeys(2, 8), None)):
        kept, given, key = adjusted(context, rotary)
        assert kept is key and given is rotary
