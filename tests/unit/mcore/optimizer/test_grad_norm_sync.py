"""A step that reads the norm with the check for NaN is the step that reads twice, to the bit, and reads once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch

from benchmarks.support.fp8_gpt import DISTRIBUTED, fp8_config
from benchmarks.support.gpt import build_chunks, build_optimizer
from benchmarks.support.ranks import Layout, model_parallel
from tests.support.fp8_params import masters
from tests.support.host_syncs import waits

GRADIENTS = {"ordinary": 1.0, "small": 1e-6, "nan": math.nan, "overflow": 1e25, "inf": math.inf}
"""What one weight's gradient has in it. Squares of 1e25 are Inf in float32: the step is taken, with a norm of Inf."""
DENSE, SHARDED = "Float16OptimizerWithFloat16Params", "DistributedOptimizer"


@dataclass
class Seen:
    """For each of GRADIENTS: (step taken, repr of the norm), and where the host looked. The masters at the end."""

    steps: list[tuple[bool, str]] = field(default_factory=list)
    looks: list[list[str]] = field(default_factory=list)
    masters: dict = field(default_factory=dict)
    kind: str = ""


def stepped(kind: str, recipe: str | None, together: bool, clip: float) -> Seen:
    """A rank case: steps with gradients that are made, not computed."""
    from megatron_fp8.mcore.optimizer import grad_norm
    from megatron_fp8.mcore.patches.gpu_engine import norm_without_waiting
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    seen, ddp = Seen(), DISTRIBUTED if kind == SHARDED else {}
    layout = Layout()
    with (
        model_parallel(layout),
        mock.patch("megatron.core.optimizer.clip_grads.l2_norm_impl", norm_without_waiting),
    ):
        config = fp8_config(layout, recipe)
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=128, ddp=ddp)
        optim = {"loss_scale": 1.0, "clip_grad": clip}
        optimizer = build_optimizer(config, chunks, ddp=ddp, optim=optim)
        seen.kind = type(optimizer.chained_optimizers[0]).__name__
        separate = mock.patch.object(grad_norm, "_reads_together", lambda chain: False)
        for number, value in enumerate(GRADIENTS.values()):
            generator = torch.Generator().manual_seed(number)
            for param in chunks[0].parameters():
                param.main_grad.copy_(torch.randn(param.main_grad.shape, generator=generator))
            next(chunks[0].parameters()).main_grad.view(-1)[3] = value
            with waits() as watched:
                if together:
                    done, norm, _ = optimizer.step()
                else:
                    with separate:
                        done, norm, _ = optimizer.step()
            seen.steps.append((bool(done), repr(norm)))
            seen.looks.append([place for place in watched.places if not place.startswith("adam.py")])
        seen.masters = masters(optimizer, chunks)
    return seen


@pytest.mark.parametrize(
    ("kind", "recipe", "clip"),
    [(DENSE, "blockwise", 1.0), (SHARDED, None, 1.0), (SHARDED, "blockwise", 0.0)],
    ids=["dense", "sharded", "sharded-fp8"],
)
def test_same_steps_and_one_look(ranks, kind, recipe, clip):
    apart, together = (ranks(1).run(stepped, kind, recipe, one, clip)[0] for one in (False, True))
    assert together.kind == kind
    assert together.steps == apart.steps and together.masters == apart.masters
    taken = dict(zip(GRADIENTS, apart.steps, strict=True))
    assert [name for name, (done, _) in taken.items() if not done] == ["nan", "inf"]
    float64 = kind == SHARDED and recipe
    assert taken["overflow"][1] == ("inf" if not float64 else taken["overflow"][1]) != "nan"
    assert together.looks == [["grad_norm.py unscale_and_check tolist"]] * len(GRADIENTS)
    assert [len(looks) for looks in apart.looks] == [2 if done else 1 for done, _ in apart.steps]
