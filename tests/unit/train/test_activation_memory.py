"""What a micro-batch keeps for its backward, against a layer whose saved tensors are known."""

from __future__ import annotations

import torch
from torch import nn

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
