"""Routers count every token, whatever the model's dtype."""

import pytest
import torch

from benchmarks.support.fp8_gpt import DEEPSEEK, fp8_config
from benchmarks.support.ranks import Layout, model_parallel
from megatron_fp8.mcore.patches.megatron_fixes import settle_biases
from megatron_fp8.mcore.runtime import Fp8Runtime


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


@pytest.mark.parametrize("first", [True, False])
def test_one_verdict_on_a_batch_settles_biases(first):
    """Where two optimizers step a model, the second finds nothing to put back: its copy would be an older one's."""
    runtime, bias = Fp8Runtime(), torch.tensor([0.5])
    runtime.moved_biases = [(bias, torch.tensor([0.25]))]
    settle_biases(runtime, skipped=first)
    assert bias.item() == (0.25 if first else 0.5)
    bias.fill_(3.0)  # loaded meanwhile, say
    settle_biases(runtime, skipped=True)
    assert bias.item() == 3.0
