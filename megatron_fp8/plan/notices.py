"""What is worth a line when a model's plan is settled, though nothing is wrong."""

from __future__ import annotations

from collections.abc import Iterable

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
