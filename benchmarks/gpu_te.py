"""Transformer Engine against this package, where it is installed: does it do as its recipe says, do losses agree?

The checks are gpu_check.py's (``--only "te "``). Not to the bit: Transformer Engine rounds scales and
adds up products in its own ways, and its delayed scaling begins with scales of one, where this package casts by the
tensor's own amax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_common import Machine, NotRun, relative_error
from benchmarks.gpu_models import DRY, TINY, Training
from megatron_fp8 import recipe
from megatron_fp8.backends import emulated
from megatron_fp8.backends import transformer_engine as engine

RECIPES: dict[str, Any] = {
    "delayed": recipe.DelayedScaling(amax_history_len=16),
    "tensorwise": recipe.Float8CurrentScaling(),
    "tensorwise-pow2": recipe.Float8CurrentScaling(use_power_2_scales=True),
    "blockwise": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
}
# Of the loss. Both quantize alike, so they differ as two GEMMs of one product do; but for delayed scaling's beginning.
LOSS_BOUND = {"delayed": 2e-2, "tensorwise": 5e-3, "blockwise": 5e-3, "mxfp8": 5e-3}

# Norms that are layers of their own here are part of the next linear there.
_RENAMED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def checks() -> dict[str, Callable[[Machine], str]]:
    """Every check by name."""
    found: dict[str, Callable[[Machine], str]] = {}
    for name in RECIPES:
        found[f"te linear {name}"] = lambda machine, name=name: linear(machine, name)  # type: ignore[misc]
    for name in LOSS_BOUND:
        found[f"training te {name}"] = lambda machine, name=name: training(machine, name)  # type: ignore[misc]
    return found


def supported(machine: Machine, name: str) -> Any:
    """The recipe; NotRun if Transformer Engine is not here or does not do it on this device."""
    reason = engine.supports(machine.device, RECIPES[name])
    if reason is not None:
        raise NotRun(reason.partition(": pip ")[0])
    return RECIPES[name]


def linear(machine: Machine, name: str) -> str:
    """Its linear casts as the recipe says, by its quantizers and by its error."""
    chosen = supported(machine, name)
    error, wrong = engine.try_linear(chosen, machine.device)
    assert not wrong, "; ".join(wrong)
    ours = emulated_error(chosen)
    assert error < 1.5 * ours, (
        f"error {error:.1e} of the unquantized product, the emulated backend's is {ours:.1e}"
    )
    return f"quantizers as asked; error {error:.1e}, the emulated backend's {ours:.1e}"


def emulated_error(chosen: Any) -> float:
    """The error of engine.try_linear's product, by the emulated backend."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(128, 256, generator=generator).to(torch.bfloat16) for _ in range(2))
    a, b = (
        emulated.quantize(tensor, chosen.rule(role), "rowwise").tensor.rowwise
        for tensor, role in ((x, "input"), (weight, "weight"))
    )
    assert a is not None and b is not None
    return relative_error(emulated.gemm(a, b, out_dtype=torch.float32), x.double() @ weight.double().t())


def training(machine: Machine, name: str) -> str:
    """A GPT on Megatron-Core with its linears: losses near the emulated backend's, every site verified and reported."""
    supported(machine, name)
    sizes, steps = (DRY, 2) if machine.dry else (TINY, 12)
    ours, theirs = Training(sizes, name, "emulated"), Training(sizes, name, engine.name)
    copy_weights(ours, theirs)
    losses = [torch.stack([run.step() for _ in range(steps)]).tolist() for run in (ours, theirs)]
    sites = [site for site in theirs.report() if site["layer"] is not None]
    assert sites and {(s["precision"], s["backend"]) for s in sites} == {("fp8", engine.name)}
    linears = [module for module in theirs.model.modules() if hasattr(module, "bind_fp8_site")]
    assert len(linears) == len(sites) and all(module.fp8_site.verified for module in linears)
    apart = max(abs(a - b) / b for a, b in zip(losses[1], losses[0], strict=True))
    assert apart < LOSS_BOUND[name], f"losses {apart:.1e} from the emulated backend's"
    return f"{losses[1][0]:.3f} -> {losses[1][-1]:.3f}; {apart:.1e} from the emulated; {len(sites)} sites verified"


def copy_weights(source: Training, target: Training) -> None:
    """The same initial weights, masters included, in a model of Transformer Engine's layers."""
    values = {}
    for name, value in source.model.named_parameters():
        for ours, theirs in _RENAMED.items():
            name = name.replace(ours, theirs)
        values[name] = value
    with torch.no_grad():
        for name, parameter in target.model.named_parameters():
            parameter.copy_(values[name])
    target.optimizer.reload_model_params()
