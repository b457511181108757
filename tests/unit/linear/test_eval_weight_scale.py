"""Evaluation's own scale of a weight between a forward of training and its backward."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.support.compare import assert_all_same_bytes
from megatron_fp8.linear.function import fp8_linear, grouped_linear
from megatron_fp8.linear.weight_cache import WeightFacts
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.sites import make_site, randn

K, N, TOKENS = 160, 136, (20, 17)


def gradients(*, as_operators: bool, grouped: bool, order: list[bool]) -> list[torch.Tensor]:
    """Of a forward in training and one in evaluation, made one after the other, with a weight that outgrew its scale."""
    state = Fp8State(keeps_weights=False)
    sites = [make_site("delayed", state=state, name=f"e.{e}", recording=False)[0] for e in range(2)]
    weights = [torch.nn.Parameter(randn(N, K, seed=e)) for e in range(2)]
    for site in sites:
        site.weights.check_scale_in_evaluation(lambda: WeightFacts(1.0, written=True, has_warned=True), print)

    def run(training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = randn(sum(TOKENS), K, seed=5).requires_grad_()
        if grouped:
            return x, grouped_linear(x, weights, TOKENS, sites, training=training)
        return x, fp8_linear(x, weights[0], None, sites[0], training=training)

    run(True)[1].sum().backward()
    state.finish_iteration()
    with torch.no_grad():
        for weight in weights:
            weight.mul_(8)
    with FlopCounterMode(display=False) if as_operators else nullcontext():
        made = [run(training) for training in order]
    found = []
    for x, y in made:
        y.backward(randn(sum(TOKENS), N, seed=3))
        assert x.grad is not None
        found += [y.detach(), x.grad]
    return found


@pytest.mark.parametrize("grouped", [False, True], ids=["a linear", "experts"])
@pytest.mark.parametrize("order", [[True, False], [False, True]], ids=["training first", "evaluation first"])
def test_each_backward_has_the_scale_of_its_forward(grouped: bool, order: list[bool]) -> None:
    """Operators leave the weight's codes with the site, where the other forward puts those of its own scale."""
    wanted = gradients(as_operators=False, grouped=grouped, order=order)
    assert_all_same_bytes(gradients(as_operators=True, grouped=grouped, order=order), wanted)
    assert not torch.equal(wanted[1], wanted[3]), "both have one scale: nothing was tested"
