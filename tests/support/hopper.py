"""Kernels compiled for an H100, or another GPU, without one: every launch becomes PTX and machine code, and none runs.

Triton brings NVIDIA's assembler, so a wrong type, a spilled register or an instruction that flushes subnormals shows on
any machine. Must run in a process that does not interpret kernels:

    TRITON_INTERPRET=0 python -m tests.support.hopper [NAME[@ARCHITECTURE] ...]      # a line of JSON for each launch
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.support.compiled import Compiled, compiled
from benchmarks.support.machine_code import blocks_of, disassembled, hot_path
from megatron_fp8.kernels.block_matmul import Product, block_matmul, grouped_block_matmul
from megatron_fp8.kernels.delayed_update import update_delayed
from megatron_fp8.kernels.fp4_quantize import Draws, cast, find_amaxes, product_factor
from megatron_fp8.kernels.fused_quantize import Swiglu, SwigluGradient, swiglu_weight_grad
from megatron_fp8.kernels.gemm_layouts import transpose
from megatron_fp8.kernels.param_cast import piece_amax, piece_cast
from megatron_fp8.kernels.quantize import (
    Record,
    measure,
    quantize_blocks,
    quantize_rows,
    quantize_tensor,
    write_matrix,
)
from megatron_fp8.numerics.cast import RandomKey
from megatron_fp8.numerics.formats import E4M3, E5M2
from tests.support.matrices import normalized

COUNTED = {
    "cast_tensor": ("delayed", "tensorwise", "norm", "swiglu"),
    "quantize_tiles": ("blockwise", "mx"),
}
"""Kernels and launches whose instructions are counted: of all threads, along the hot path."""


def described(name: str, built: Compiled) -> dict[str, Any]:
    """Kernel name, PTX instructions, registers and spilled bytes a thread, and which of Triton's options were named."""
    counts: dict[str, int] = {}
    for opcode in re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.:]+)[ ;]", built.ptx, re.M):
        counts[opcode] = counts.get(opcode, 0) + 1
    return {
        "kernel": built.name,
        "opcodes": counts,
        "registers": built.resources["REG"],
        "stack": built.resources["STACK"],
        "shared": built.shared,
        "warps": built.warps,
        "options": built.options,
        "issued": 32 * built.warps * built.programs * hot_path(blocks_of(disassembled(built.cubin))).issued
        if name in COUNTED.get(built.name, ())
        else None,
    }


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches() -> dict[str, Callable[[], Any]]:
    """What a transformer layer of hidden 4096 launches on 8192 tokens, by name."""
    x, dy = empty(8192, 4096, dtype=torch.bfloat16), empty(8192, 2048, dtype=torch.bfloat16)
    odd = empty(8191, 4096, dtype=torch.bfloat16)
    codes = empty(8192, 4096, dtype=torch.float8_e4m3fn)
    grads = empty(8192, 4096, dtype=torch.float8_e5m2)
    weight = empty(4096, 4096, dtype=torch.float8_e4m3fn)
    by_row, square = empty(32, 8192).t(), empty(32, 32)
    gamma, one, record = empty(4096, dtype=torch.bfloat16), empty(), Record(empty(), empty())
    master, pieces, many = empty(1 << 22), empty(1 << 22, dtype=torch.uint8), torch.int64
    fp4: dict[str, Any] = {"tiled": True, "pad_to": 32, "room": 16}
    draws = Draws(RandomKey(5, 6, 7, 8), 0, 4096)
    return {
        "measure": lambda: measure(x, rows=True, cols=True, record=record),
        "delayed": lambda: quantize_tensor(x, E4M3, scale=one, record=record),
        "delayed-float32": lambda: quantize_tensor(empty(4096, 4096), E5M2, scale=one, record=record),
        "tensorwise": lambda: quantize_tensor(x, E4M3, amax=one),
        "rowwise": lambda: quantize_rows(x, E4M3, empty(8192), empty(4096)),
        "blockwise": lambda: quantize_blocks(x, E4M3, block=128, record=record),
        "blockwise-fp32": lambda: quantize_blocks(x, E5M2, block=128, kind="fp32", record=record),
        "blockwise-weight": lambda: quantize_blocks(x, E4M3, block=128, square=True, record=record),
        "mx": lambda: quantize_blocks(x, E4M3, block=32, kind="e8m0", record=record),
        # Tokens that 16 does not divide, as casts for products have them.
        "delayed-odd": lambda: quantize_tensor(odd, E4M3, scale=one, record=record, pad_to=16),
        "mx-odd": lambda: quantize_blocks(
            odd, E4M3, block=32, kind="e8m0", tiled=True, record=record, pad_to=32
        ),
        "norm": lambda: quantize_tensor(normalized(x, gamma), E4M3, scale=one, record=record),
        "column-norm": lambda: write_matrix(normalized(empty(64, 1), empty(1))),
        "norm-written": lambda: write_matrix(normalized(x, gamma)),
        "swiglu-grad-written": lambda: write_matrix(SwigluGradient(dy, x, gamma)),
        "swiglu": lambda: quantize_tensor(Swiglu(x), E4M3, scale=one, record=record),
        "swiglu-grad": lambda: quantize_tensor(SwigluGradient(dy, x), E5M2, scale=one, record=record),
        "swiglu-grad-blockwise": lambda: quantize_blocks(
            SwigluGradient(dy, x), E4M3, block=128, record=record
        ),
        "swiglu-weight-grad": lambda: swiglu_weight_grad(dy, x),
        "nvfp4-amaxes": lambda: find_amaxes(x, transformed=True, nonfinite=one, running=one),
        "nvfp4-factor": lambda: product_factor(one, one),
        "nvfp4": lambda: cast(x, "both", empty(2), transformed=True, **fp4),
        "nvfp4-weight": lambda: cast(x, "both", empty(2), square=True, **fp4),
        "nvfp4-stochastic": lambda: cast(x, "both", empty(2), transformed=True, draws=draws, **fp4),
        "nvfp4-norm": lambda: cast(normalized(x, gamma), "both", empty(2), transformed=True, **fp4),
        "nvfp4-swiglu-grad": lambda: cast(
            SwigluGradient(dy, x), "both", empty(2), transformed=True, draws=draws, **fp4
        ),
        "transpose": lambda: transpose(codes),
        "piece-amax": lambda: piece_amax(master, 0, (4096, 4096), torch.bfloat16, square, one),
        "piece-cast": lambda: piece_cast(master, 0, (4096, 4096), torch.bfloat16, square, pieces, E4M3),
        "update": lambda: update_delayed(
            empty(900),
            empty(900),
            empty(900, dtype=many),
            empty(900, dtype=many),
            empty(32, 900, 32),
            empty(32, 900),
            empty(900),
            length=1024,
        ),
        "update-short": lambda: update_delayed(
            empty(900),
            empty(900),
            empty(900, dtype=many),
            empty(900, dtype=many),
            empty(1, 900, 2),
            empty(1, 900),
            empty(900),
            length=2,
        ),
        "matmul": lambda: block_matmul(codes, by_row, weight, square, b_height=128),
        "matmul-wgrad": lambda: block_matmul(grads, by_row, codes, by_row, out_dtype=torch.float32),
        "matmul-wgrad-added": lambda: block_matmul(
            grads, by_row, codes, by_row, out_dtype=torch.float32, into=empty(8192, 8192)
        ),
        "matmul-grouped-wgrad": lambda: grouped_block_matmul(
            grads,
            [Product(grads, by_row, codes, by_row, empty(8192, 8192))],
            a_height=1,
            b_height=1,
            add=True,
        ),
        "matmul-grouped": lambda: grouped_block_matmul(
            codes,
            [Product(codes, by_row, weight, square, empty(8192, 4096, dtype=torch.bfloat16))],
            a_height=1,
            b_height=128,
        ),
    }


def main() -> None:
    made = launches()
    for wanted in sys.argv[1:] or [
        *made,
        *(f"{n}@{a}" for n in made if n.startswith(("nvfp4", "matmul")) for a in (100, 120)),
    ]:
        name, _, architecture = wanted.partition("@")
        for launch in compiled(made[name], int(architecture or 90)):
            print(json.dumps({"name": wanted} | described(name, launch)), flush=True)


if __name__ == "__main__":
    main()
