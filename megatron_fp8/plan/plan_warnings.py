"""Notices printed when a plan is made, for plans that run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..backends.native import backend as native
from ..backends.native.backend import padded_products
from ..files.rank0_print import print_rank_0
from ..kernels.cpu.library import missing_compiler
from .site_plan import SitePlan

MX_BLOCK = 32


def warn_of_high_precision(plans: Iterable[SitePlan], remedy: str) -> None:
    """Prints a line, once, if gradients are E5M2 in MX blocks, where E4M3 would be better.

    Each block has its own scale and needs no wide range, and E4M3 has one more mantissa bit. Others saw training
    diverge with E5M2 (Megatron-Bridge #638, ROCm/Megatron-LM #100; arXiv 2506.08027 uses E4M3 for all tensors). For
    blocks of 128 reports disagree (TransformerEngine #2754), and nothing is printed.

    Args:
        remedy: the setting that makes gradients E4M3, as the caller's users write it.
    """
    for plan in plans:
        rule = plan.rules["grad_output"]
        if rule is not None and rule.fmt.name == "e5m2" and rule.granularity.cols == MX_BLOCK:
            print_rank_0(
                f"megatron_fp8: gradients in E5M2 lose a mantissa bit for nothing in MX blocks: {remedy} is worth trying"
                " (docs/recipes.md)",
                once=True,
            )
            return


def warn_fallback(name: str, dtype: str, reason: str) -> None:
    """Prints a line, once, for a linear that stays in ``dtype`` because it cannot run as requested."""
    print_rank_0(f"megatron_fp8: {name} runs in {dtype}: {reason}", once=True)


def padded_note(plan: SitePlan, device: torch.device, n: int, k: int) -> str | None:
    """Returns the report's note for a weight [N, K] of this rank whose sizes the GPU's GEMM does not support.

    Its codes are copied to pad them, in every step. None for other weights.
    """
    if plan.backend != native.name or not (gemms := padded_products(device, plan.products, n, k)):
        return None
    return f"K {k} x N {n} is not what the GPU's product takes: {', '.join(gemms)} copy codes, to pad them"


def warn_no_compiler(device: torch.device) -> None:
    """Prints a line, once, if linears run on a CPU without compiled kernels and there is no GPU."""
    if device.type == "cpu" and not torch.cuda.is_available() and (reason := missing_compiler()) is not None:
        print_rank_0(
            f"megatron_fp8: {reason}. Without compiled kernels a training step takes about twice as long, with the same"
            " codes and scales",
            once=True,
        )


def warn_padding(notes: Mapping[str, str], sites: int) -> None:
    """Prints a line, once, if some weights are padded.

    Args:
        notes: weight name -> note, for this rank's padded weights.
        sites: number of all sites of this rank.
    """
    if notes:
        name, note = next(iter(notes.items()))
        print_rank_0(
            f"megatron_fp8: {len(notes)} of this rank's {sites} GEMM sites have sizes that are padded ({name}:"
            f" {note}); multiples of 16 on each rank (of 128 in blocks, of 32 in mxfp8) cost nothing"
            " (docs/no_speed_up.md)",
            once=True,
        )
