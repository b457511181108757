"""The loss of multi-token prediction, which one pipeline stage knows and rank 0 records."""

from __future__ import annotations

import pytest

from benchmarks.support.ranks import Layout, RankPool, model_parallel


def iteration_with_mtp() -> tuple[float, bool]:
    """A rank case, two stages: two micro-batches of two losses each on the last one; and whether anything is left."""
    import torch
    import torch.distributed as dist

    with model_parallel(Layout(pp=2)):
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        from megatron_fp8.train.step import take_mtp_loss

        if dist.get_rank() == 1:
            for losses in ((6.0, 7.0), (2.0, 3.0)):
                for layer, loss in enumerate(losses):
                    MTPLossLoggingHelper.save_loss_to_tracker(torch.tensor(loss), layer, 2)
        return take_mtp_loss(2, torch.device("cpu")), bool(MTPLossLoggingHelper.tracker)


def test_the_mean_over_microbatches_and_depths_reaches_every_rank(ranks: RankPool) -> None:
    assert ranks(2).run(iteration_with_mtp) == [(pytest.approx(4.5), False)] * 2
