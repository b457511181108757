"""Kernels: compiled C for CPUs (cpu.py), Triton for NVIDIA GPUs (the other files; importing them loads Triton)."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


def run_on(device: torch.device) -> bool:
    """Whether Triton kernels run on tensors of this device: an NVIDIA GPU, and Triton is installed.

    Not in code that torch.compile traces, which generates its own. Those that make codes need compute capability 8.9
    besides, which the native backend has made sure of.
    """
    return device.type == "cuda" and not torch.compiler.is_compiling() and _installed()


@cache
def _installed() -> bool:
    return not vars(torch.version).get("hip") and find_spec("triton") is not None
