"""Minimal kernel that tests whether Triton can compile and launch here."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import on_its_device


@on_its_device
def launch(out: torch.Tensor) -> None:
    """Write 1 into the first element of ``out`` [n]. Raises any error of Triton, its compiler or its cache."""
    _write_one[(1,)](out, enable_fp_fusion=False)


@triton.jit
def _write_one(out):
    tl.store(out, 1)
