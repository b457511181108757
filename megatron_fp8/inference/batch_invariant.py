"""Batch invariance: in inference a row's bits do not depend on its batch.

    prepare_for_inference(model, batch_invariant=True)       # FP8 linears, and all around them
    make_batch_invariant(model)                              # a model in high precision

Three things make a row depend on others. A scale may be made of all rows: inputs get a scale per row instead, unless it
is stored. A product's order of sums may follow the number of rows: C's does not, and what C does not take is multiplied
row by row. The same holds of torch's other operators on CPUs: matrix products choose kernels by size; sums over a row
are split among threads where there is one row; and a pointwise function such as silu has other bits in vectors than in
the last few elements of a thread's part. A dispatch mode around the model's forward runs these row by row, and attention
and convolutions sequence by sequence. Measured with torch 2.13: softmax, layer norms, sums of two and products of two
numbers, and casts are the same as they are.

Rejected: overriding torch's operators for the process, as vLLM and batch_invariant_ops do: other models would change.
Rejected: GPUs. cuBLAS and torch._scaled_mm choose by the number of rows, and nobody here could try fixed tiles.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..linear.gemm_site import GemmSite
from ..numerics.rule import ROW, Rule
from ..quantizer import Quantizer
from ..recipe import recipe_name
from .batch_invariant_operators import BatchInvariantMode
from .static_scales import StaticScale

# ---------------------------------------------------------------------------------------------------------------- sites


@dataclass(frozen=True)
class BatchInvariantSite:
    """Makes one site batch invariant: static scale, or a scale per row in place of one per tensor; its products."""

    static: StaticScale | None = None

    def __call__(self, site: GemmSite) -> None:
        """Change the site in place."""
        casts = site.casts["input"]
        if self.static is not None:
            self.static(site)
        elif (quantizer := casts.rowwise) is not None and _has_tensor_scale(quantizer):
            by_row = replace(quantizer.rule, granularity=ROW, delayed=False)
            changed = Quantizer(by_row, quantizer.slot, quantizer.backend)
            site.casts["input"] = casts._replace(rowwise=changed)
        site.batch_invariant = True


def _has_tensor_scale(quantizer: Quantizer) -> bool:
    """Whether its scale is made of the whole batch."""
    return quantizer.rule.granularity.is_tensor and quantizer.delayed_scale() is None


def check_batch_invariant(model: torch.nn.Module, linears: list[Any], *, static: bool) -> None:
    """ValueError, with the remedy, unless the model can be batch invariant here.

    Args:
        linears: those with a GEMM site.
        static: whether inputs get static scales.
    """
    device = next((p.device for p in model.parameters() if p.device.type != "cpu"), None)
    if device is not None:
        raise ValueError(
            f"batch_invariant=True on {device}: torch's GEMMs choose kernels by the number of rows there, and"
            " only CPUs have fixed ones: move the model to the CPU, or leave the option out"
        )
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)):
            raise ValueError(
                f"batch_invariant=True with {name} ({type(module).__name__}): torch's recurrent kernels depend on the"
                " batch: leave the option out"
            )
    config = getattr(model, "config", None)
    for name in ("tensor_model_parallel_size", "expert_model_parallel_size"):
        if (size := getattr(config, name, 1)) not in (1, None):
            raise ValueError(
                f"batch_invariant=True with {name}={size}: a sum over ranks depends on the message's size: use 1"
            )
    if (factor := getattr(config, "moe_expert_capacity_factor", None)) is not None:
        raise ValueError(
            f"batch_invariant=True with moe_expert_capacity_factor={factor}: which tokens an expert drops depends on the"
            " batch: use None"
        )
    for linear in linears:
        site = linear.fp8_site
        if site.plan.backend not in (None, "emulated"):
            raise ValueError(
                f"batch_invariant=True with fp8_backend {site.plan.backend!r} ({site.plan.name}): its GEMMs choose"
                " kernels by the number of rows: use 'emulated'"
            )
        quantizer = site.casts["input"].rowwise
        if quantizer is not None and not static and (why := _depends_on_batch(quantizer.rule)):
            raise ValueError(
                f"batch_invariant=True with recipe {recipe_name(site.plan.recipe)!r} ({site.plan.name}): {why}"
            )


def _depends_on_batch(rule: Rule) -> str | None:
    """Why scales of an input by this rule need other rows, where scales per row cannot replace them."""
    if rule.scale == "e4m3":
        return "the second scale of its inputs is the batch's: give calibration= (generate: --activations static)"
    if rule.granularity.rows > 1:
        return f"its inputs have scales per {rule.granularity} block, which rows share: choose another recipe"
    return None


# ----------------------------------------------------------------------------------------------------------- the model


def make_batch_invariant(model: torch.nn.Module) -> None:
    """Runs the torch operators of each forward of the model so that a row's bits do not depend on other rows.

    Rows are the slices along the last dimension. Attention is invariant in the number of sequences, not of tokens.
    Done twice, it changes nothing.

    Raises as ``check_batch_invariant``.
    """
    check_batch_invariant(model, [], static=False)
    if not any(isinstance(hook, _Enter) for hook in model._forward_pre_hooks.values()):
        model.register_forward_pre_hook(_Enter(), prepend=True)
        model.register_forward_hook(_Leave(), always_call=True)


# Not traced: what torch.compile makes of the model's other code has kernels of its own, and is not invariant.
class _Enter:
    @torch.compiler.disable
    def __call__(self, model: torch.nn.Module, args: Any) -> None:
        mode = BatchInvariantMode()
        mode.__enter__()
        _active_modes().append(mode)


class _Leave:
    @torch.compiler.disable
    def __call__(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        _active_modes().pop().__exit__(None, None, None)


_threads = threading.local()


def _active_modes() -> list[BatchInvariantMode]:
    """The modes that forwards of this thread are in."""
    if not hasattr(_threads, "modes"):
        _threads.modes = []
    modes: list[BatchInvariantMode] = _threads.modes
    return modes
