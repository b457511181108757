"""What a step counts: the bytes that a micro-batch saves for its backward, the loss of multi-token prediction."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.nn import convert_to_fp8
from megatron_fp8.nn.frozen_weights import freeze_weights
from megatron_fp8.train.step import ActivationMemory


class Twice(nn.Module):
    """Saves its input once for two products, and the sum's sigmoid; weights are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(8, 16, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one(x) + self.two(x)).sigmoid()


def test_each_storage_counts_once_and_parameters_do_not():
    model = Twice()
    saved = ActivationMemory([model])
    x = torch.randn(4, 8, requires_grad=True)
    with saved.counting(model):
        y = model(x)
    assert saved.bytes == 4 * (4 * 8 + 4 * 16)
    y.sum().backward()
    with saved.counting(model):
        model(torch.randn(400, 8, requires_grad=True))
    assert saved.bytes == 4 * (4 * 8 + 4 * 16), "one micro-batch of each chunk"


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_codes_of_fp8_parameters_count_nothing(recipe):
    model = freeze_weights(convert_to_fp8(nn.Sequential(nn.Linear(64, 128, bias=False)), recipe))
    saved = ActivationMemory([model])
    with saved.counting(model):
        model(torch.randn(32, 64, requires_grad=True)).sum().backward()
    assert saved.bytes == 0


def test_what_is_emptied_in_the_forward_counts_nothing():
    model = nn.Identity()
    saved = ActivationMemory([model])
    with saved.counting(model):
        x = torch.randn(4, 8, requires_grad=True) * 1
        kept = x.exp()
        kept.untyped_storage().resize_(0)
    assert saved.bytes == 0


def test_chunks_add_up():
    chunks = [Twice(), Twice()]
    saved = ActivationMemory(chunks)
    for chunk in chunks:
        with saved.counting(chunk):
            chunk(torch.randn(4, 8, requires_grad=True))
    assert saved.bytes == 2 * 4 * (4 * 8 + 4 * 16)


def iteration_with_mtp() -> tuple[float, bool]:
    """A rank case, two stages: two micro-batches of two losses each on the last one; and whether anything is left."""
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
