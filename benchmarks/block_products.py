"""Registers and spills of the block-scaled product, compiled without a GPU.

    TRITON_INTERPRET=0 python -m benchmarks.block_products [--write]

Tensor cores bound it and not memory, so instructions.py does not count it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from contextlib import nullcontext
from unittest import mock

import torch

from benchmarks.common import environment, table, write_results
from benchmarks.instructions import BF16, DEVICES, HIDDEN, TOKENS, Device, empty, programs
from benchmarks.support.compiled import compiled
from benchmarks.support.machine_code import disassembled

HEADER = ["product", "device", "codes by", "tile", "registers", "spills", "shared KiB", "programs"]


def products() -> list[list[str]]:
    """The table's cells of every kind of block-scaled product: codes by descriptors or pointers; of one pair and grouped;
    N = 4096 and one that 16 does not divide. K is padded to 16 before."""
    kinds = itertools.product(DEVICES, (True, False), (HIDDEN, HIDDEN - 1), (128, 1), (False, True))
    return [_product(*kind) for kind in kinds]


def _product(device: Device, tma: bool, n: int, height: int, grouped: bool) -> list[str]:
    from megatron_fp8.kernels import block_matmul as products
    from megatron_fp8.kernels.block_matmul import ROWS, Product, block_matmul, columns, grouped_block_matmul

    a, b = (empty(rows, HIDDEN, dtype=torch.float8_e4m3fn) for rows in (TOKENS, n))
    of_a, of_b = empty(HIDDEN // 128, TOKENS).t(), empty(HIDDEN // 128, -(-n // height)).t()
    dtype, add = (torch.float32, True) if height == 1 else (BF16, False)  # wgrad; fprop and dgrad
    out = empty(TOKENS, n, dtype=dtype)

    def launch() -> None:
        if grouped:
            grouped_block_matmul(a, [Product(a, of_a, b, of_b, out)], a_height=1, b_height=height, add=add)
        else:
            block_matmul(a, of_a, b, of_b, b_height=height, out_dtype=dtype, into=out, add=add)

    with nullcontext() if tma else mock.patch.object(products, "has_tma", lambda: False):
        (made,) = compiled(launch, device.architecture)
    assert ("cp.async.bulk.tensor" in made.ptx) == tma
    registers, code = made.resources["REG"], disassembled(made.cubin)
    kind = "fprop, dgrad" if height == 128 else "wgrad, added"
    cells = [
        f"{kind}: 1x128 by {height}x128, N {n}{', grouped' * grouped}",
        device.name,
        "TMA" if tma else "pointers",
        f"{ROWS}x{columns(1, height)}",
        registers,
        code.count("STL") + code.count("LDL"),
        made.shared // 1024,
        programs(registers, made.shared, made.warps),
    ]
    return [str(cell) for cell in cells]


def main() -> int:
    """Compile, print, write; 1 where a product spills."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/block_products.*")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("unset TRITON_INTERPRET: kernels are compiled here")
    rows = products()
    body = table(HEADER, rows)
    print(body, flush=True)
    if args.write:
        record = environment(["triton"]) | {"measured": "counted, not measured"}
        command = "python -m benchmarks.block_products --write"
        data = [dict(zip(HEADER, row, strict=True)) for row in rows]
        title = "Registers and spills of the block-scaled product"
        write_results("block_products", title, command, record, body, data)
    return int(any(row[HEADER.index("spills")] != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
