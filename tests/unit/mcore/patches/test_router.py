"""Routers count every token, whatever the model's dtype."""

import torch

from benchmarks.support.fp8_gpt import DEEPSEEK, fp8_config
from benchmarks.support.ranks import Layout, model_parallel


def counts(batches):
    """A rank case: tokens that a BF16 router says it has sent to experts after batches of these sizes, and the dtype."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.router import TopKRouter

    with model_parallel():
        config = fp8_config(Layout(), None, **DEEPSEEK)
        router = TopKRouter(config, get_default_pg_collection()).bfloat16()
        for size in batches:
            router(torch.randn(size, 1, config.hidden_size, dtype=torch.bfloat16))
        return float(router.local_tokens_per_expert.sum()), router.local_tokens_per_expert.dtype


def test_no_token_is_lost(ranks):
    """BF16 would stay at 512 for each of four experts, when tokens come one at a time."""
    sizes = [1023, *[1] * 41]
    assert ranks(1).run(counts, sizes)[0] == (2.0 * sum(sizes), torch.float32)
