"""Which models an optimizer steps: those it was made for, or those whose parameters it holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron_fp8.mcore.optimizer.optimizer_setup import checked_and_recorded, runtimes_stepped_by
from megatron_fp8.mcore.runtime import Fp8Runtime, runtime_of


class Config:
    """Anything that a model calls its config."""


class Optimizer:
    """As Megatron-Core's: around one of torch's, or around nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer | None = None):
        self.optimizer = optimizer


def a_model() -> tuple[Any, Fp8Runtime]:
    model = torch.nn.Linear(1, 1, bias=False)
    model.config = Config()
    runtime = runtime_of(model.config)
    runtime.prepared.add(model)
    return model, runtime


def test_the_models_that_it_was_made_for():
    (model, its), (_, _) = a_model(), a_model()

    def make(config: Any, model_chunks: list[Any], param_groups: Any = None) -> Optimizer:
        return Optimizer()

    make, config = (
        checked_and_recorded(make),
        SimpleNamespace(optimizer_cpu_offload=False, use_precision_aware_optimizer=False),
    )
    for optimizer in (make(config, [model]), make(config, model_chunks=[model])):
        assert runtimes_stepped_by(optimizer) == [its], "without a parameter too"
        chain = SimpleNamespace(chained_optimizers=[optimizer, Optimizer()])
        assert runtimes_stepped_by(chain) == [its]
    assert runtimes_stepped_by(make(config, [torch.nn.Linear(1, 1)])) == []


def test_the_models_whose_parameters_it_holds():
    (model, its), (other, others) = a_model(), a_model()
    by_hand = Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert runtimes_stepped_by(by_hand) == [its]
    master = torch.nn.Parameter(torch.ones(1, 1))
    other.weight.main_param = master
    assert runtimes_stepped_by(Optimizer(torch.optim.SGD([master], lr=0.1))) == [others]
    chain = SimpleNamespace(chained_optimizers=[by_hand, Optimizer(torch.optim.SGD([master], lr=0.1))])
    assert runtimes_stepped_by(chain) == [its, others]
    assert runtimes_stepped_by(Optimizer()) == []
