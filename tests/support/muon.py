"""Megatron-Core's Muon on any machine: with the package emerging_optimizers, or a stand-in for it.

The stand-in orthogonalizes by torch.optim.Muon's own function. (The package's releases need Python 3.12.)
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
from torch.optim._muon import _zeropower_via_newtonschulz


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Momentum, orthogonalized by ``orthogonalize``, with decoupled weight decay."""

    def __init__(
        self, params: Any, lr: float, momentum_beta: float, weight_decay: float, **options: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum_beta, "weight_decay": weight_decay})
        self.scaled_orthogonalize_fn = options["scaled_orthogonalize_fn"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(self.orthogonalize(p, buffer), alpha=-group["lr"])  # type: ignore[attr-defined]


def newton_schulz_tp(x: torch.Tensor, steps: int, **_: Any) -> torch.Tensor:
    return _zeropower_via_newtonschulz(x, (3.4445, -4.7750, 2.0315), steps, 1e-7).to(x.dtype)


def get_muon_scale_factor(rows: int, cols: int, mode: str) -> float:
    assert mode == "spectral"
    return float(max(rows, cols) ** 0.5)


def megatron_muon() -> Any:
    """megatron.core.optimizer.muon, which looks for the package when it is imported."""
    if importlib.util.find_spec("emerging_optimizers") is None:
        package = "emerging_optimizers.orthogonalized_optimizers"
        for name, members in {
            "emerging_optimizers": (),
            package: (OrthogonalizedOptimizer, get_muon_scale_factor),
            f"{package}.muon_utils": (newton_schulz_tp,),
        }.items():
            module = ModuleType(name)
            module.__spec__ = importlib.util.spec_from_loader(name, None)
            vars(module).update({member.__name__: member for member in members})
            sys.modules.setdefault(name, module)
    muon = importlib.import_module("megatron.core.optimizer.muon")
    return muon if muon.HAVE_EMERGING_OPTIMIZERS else importlib.reload(muon)


def build_muon(config: Any, chunks: list[Any], *, ddp: Any = None, optim: Any = None) -> Any:
    """As benchmarks.support.gpt.build_optimizer; ``optim`` has 'layer_wise'."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig

    wanted = OptimizerConfig(
        optimizer="muon", lr=1e-3, weight_decay=0.01, clip_grad=1.0, bf16=True, params_dtype=torch.bfloat16
    )
    optimizer = megatron_muon().get_megatron_muon_optimizer(
        wanted, chunks, layer_wise_distributed_optimizer=(optim or {}).get("layer_wise", False)
    )
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    return optimizer
