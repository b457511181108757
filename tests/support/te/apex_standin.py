"""An apex that runs on a CPU: ``install()`` before Megatron-Core; ``calls`` counts what was used of it."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections import Counter
from typing import Any

import torch

calls: Counter[str] = Counter()


def _scale(chunk: int, overflow: torch.Tensor, tensors: list[list[torch.Tensor]], factor: float) -> None:
    calls["multi_tensor_scale"] += 1
    for source, target in zip(*tensors, strict=True):
        target.copy_(source * factor)


def _norm(chunk: int, overflow: torch.Tensor, tensors: list[list[torch.Tensor]], per: bool) -> Any:
    calls["multi_tensor_l2norm"] += 1
    return torch.stack([t.float().norm() for t in tensors[0]]).norm().reshape(1), None


def _apply(op: Any, overflow: torch.Tensor, tensors: Any, *args: Any) -> Any:
    return op(65536, overflow, tensors, *args)


def _accumulate(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
    calls["wgrad_gemm_accum_fp32"] += 1
    main_grad.add_(dy.float().t() @ x.float())


class FusedLayerNormAffineFunction:
    """The autograd function that Megatron-Core's FusedLayerNorm calls, and whose parameters it looks at."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any, normalized_shape: Any, eps: float) -> None:
        """Only looked at."""

    @staticmethod
    def apply(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, shape: Any, eps: float
    ) -> torch.Tensor:
        calls["layer_norm"] += 1
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)


def install() -> None:
    """apex with every CUDA extension that Megatron-Core looks for."""
    from megatron_fp8.mcore.optimizer.adam import Adam  # apex's contract is the one it keeps

    class FusedAdam(Adam):
        def step(self, closure: Any = None) -> Any:
            calls["adam"] += 1
            return super().step(closure)

    FusedAdam.__module__ = "apex.optimizers.fused_adam"
    modules: dict[str, dict[str, Any]] = {
        "apex": {},
        "apex.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": torch.optim.SGD},
        "apex.multi_tensor_apply": {"multi_tensor_applier": _apply},
        "apex.normalization": {},
        "apex.normalization.fused_layer_norm": {"FusedLayerNormAffineFunction": FusedLayerNormAffineFunction},
        "amp_C": {"multi_tensor_scale": _scale, "multi_tensor_l2norm": _norm},
        "fused_layer_norm_cuda": {},
        "fused_weight_gradient_mlp_cuda": {"wgrad_gemm_accum_fp32": _accumulate},
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []  # type: ignore[attr-defined]
        vars(module).update(contents)
        sys.modules[name] = module
