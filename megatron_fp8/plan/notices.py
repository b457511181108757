"""What is worth a line when a model's plan is settled, though nothing is wrong."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..backends.native import backend as native
from ..backends.native.padding import padded_products
from ..files.say import say
from .site_plan import SitePlan

MX_BLOCK = 32


def say_what_is_lost(plans: Iterable[SitePlan], remedy: str) -> None:
    """A line, once, where gradients are E5M2 in MX blocks: each block has its own scale and needs no range, and E4M3 has
    a mantissa bit more. Others saw training diverge by it (Megatron-Bridge #638, ROCm/Megatron-LM #100; arXiv 2506.08027
    has E4M3 for all tensors). For blocks of 128 reports disagree (TransformerEngine #2754), and nothing is said.

    Args:
        remedy: the setting that makes gradients E4M3, in the words of whoever asks.
    """
    for plan in plans:
        rule = plan.rules["grad_output"]
        if rule is not None and rule.fmt.name == "e5m2" and rule.granularity.cols == MX_BLOCK:
            say(
                f"megatron_fp8: gradients in E5M2 lose a mantissa bit for nothing in MX blocks: {remedy} is worth trying"
                " (docs/recipes.md)",
                once=True,
            )
            return


def say_what_is_padded(sites: Iterable[tuple[SitePlan, torch.Tensor]]) -> dict[str, str]:
    """A line, once, if weights have sizes that the GPU's products do not take as they are, and codes are copied to pad
    them, in every step.

    Args:
        sites: plans, and the weights [N, K] of this rank.

    Returns:
        Name -> a note for the report, of these sites.
    """
    found: dict[str, str] = {}
    sites = list(sites)
    for plan, weight in sites:
        n, k = weight.shape
        if plan.backend == native.name and (gemms := padded_products(weight.device, plan.products, n, k)):
            found[plan.name] = (
                f"K {k} x N {n} is not what the GPU's product takes: {', '.join(gemms)} copy codes, to pad them"
            )
    if found:
        name, note = next(iter(found.items()))
        say(
            f"megatron_fp8: {len(found)} of this rank's {len(sites)} GEMM sites have sizes that are padded ({name}:"
            f" {note}); multiples of 16 on each rank (of 128 in blocks, of 32 in mxfp8) cost nothing (docs/shapes.md)",
            once=True,
        )
    return found
