"""When an optimizer is made: options that would crash in a step are refused, and its models are recorded."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.support.fp8_gpt import NARROW, fp8_config
from benchmarks.support.gpt import build_chunks, build_optimizer
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.mcore.optimizer.optimizer_setup import check_and_record, check_options, runtimes_stepped_by
from megatron_fp8.mcore.runtime import Fp8Runtime, runtime_of

OFFLOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
AWARE = {**OFFLOADED, "use_precision_aware_optimizer": True}
DISTRIBUTED = {"use_distributed_optimizer": True}

# Name -> recipe, fp8_param, DDP's fields, the optimizer's, whether there is CUDA, what the message has ('': no error)
CASES: dict[str, tuple[str | None, bool, dict[str, Any], dict[str, Any], bool, str]] = {
    "BF16": (None, False, DISTRIBUTED, OFFLOADED, False, "there is no GPU here: set it to False"),
    "FP8 parameters": ("tensorwise", True, DISTRIBUTED, OFFLOADED, False, "there is no GPU here: set it to False"),
    "plain optimizer": ("delayed", True, {}, OFFLOADED, True, "Set use_distributed_optimizer=True here"),
    "plain, BF16 weights": (None, False, {}, OFFLOADED, True, "and its first step fails"),
    "its own masters": ("mxfp8", True, DISTRIBUTED, AWARE, True, "Set use_precision_aware_optimizer=False"),
    "neither": ("tensorwise", True, DISTRIBUTED, {}, False, ""),
}  # fmt: skip


def refused(
    recipe: str | None, fp8_param: bool, ddp: dict[str, Any], optim: dict[str, Any], cuda: bool
) -> tuple[str, bool]:
    """A rank case: what get_megatron_optimizer says ('': nothing), and whether it made an Adam before."""
    from megatron.core import optimizer as theirs

    from megatron_fp8.mcore.optimizer import optimizer_setup
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    with model_parallel(Layout()):
        config = fp8_config(Layout(), recipe, **{**NARROW, "num_layers": 1, "fp8_param": fp8_param})
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, ddp=ddp, sequence=32)
        with (
            mock.patch.object(optimizer_setup.compat, "has_cuda", lambda: cuda),
            mock.patch.object(theirs, "Adam", wraps=theirs.Adam) as adam,
        ):
            try:
                build_optimizer(config, chunks, ddp=ddp, optim=optim)
            except ValueError as error:
                return str(error), adam.called
            return "", adam.called


@pytest.mark.parametrize("case", CASES)
def test_offloading(ranks: RankPool, case: str) -> None:
    *setting, said = CASES[case]
    ((message, made),) = ranks(1).run(refused, *setting)
    assert said in message and "\n" not in message
    assert bool(message) == bool(said) != made


@pytest.mark.parametrize("fp8_param", [True, False])
def test_precision_aware(fp8_param: bool) -> None:
    model, _ = a_model()
    model.config.fp8, model.config.fp8_param = "hybrid", fp8_param
    config = SimpleNamespace(optimizer_cpu_offload=False, use_precision_aware_optimizer=True)
    with pytest.raises(ValueError, match="fp8_param=True was never tried") if fp8_param else nullcontext():
        check_options(config, [model])


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

    config = SimpleNamespace(optimizer_cpu_offload=False, use_precision_aware_optimizer=False)
    for optimizer in (
        check_and_record(make, config, [model]),
        check_and_record(make, config, model_chunks=[model]),
    ):
        assert runtimes_stepped_by(optimizer) == [its], "without a parameter too"
        chain = SimpleNamespace(chained_optimizers=[optimizer, Optimizer()])
        assert runtimes_stepped_by(chain) == [its]
    assert runtimes_stepped_by(check_and_record(make, config, [torch.nn.Linear(1, 1)])) == []


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
