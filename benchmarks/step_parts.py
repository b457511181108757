"""The products and casts of the CPU training step, one by one, beside BF16's products: `python benchmarks/step_parts.py`.

The linears are those of benchmarks/step.py's blocks with 1,024 tokens. Each cell is a time as a multiple of torch's BF16
product of the same role, the weight gradient's with its addition to the float32 main_grad, as Megatron-Core makes it.
Shapes are the linear's weight, [N, K]; the sum of all parts of a linear is the last column. What is slow is seen here
before it is guessed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import (
    argument_parser,
    clock_of,
    command_line,
    describe,
    environment,
    interleave,
    keep_memory,
    table,
    write_results,
)
from megatron_fp8.backends import emulated
from megatron_fp8.kernels.cpu import emulation
from megatron_fp8.recipe import RECIPES as CLASSES
from megatron_fp8.tensor import QuantizedSide

TOKENS = 1024
RECIPES = ("rowwise", "blockwise", "mxfp8", "tensorwise", "delayed")
HIDDEN = (256, 512, 1024, 2048)
PARTS = ("fprop", "dgrad", "wgrad", "input", "weight", "gradient")


def linears(hidden: int) -> dict[str, tuple[int, int]]:
    """[N, K] of a block's weights, by name; the sizes of benchmarks/step.py."""
    ffn = hidden * 11 // 4
    return {
        "qkv": (hidden * 3 // 2, hidden),
        "proj": (hidden, hidden),
        "fc1": (2 * ffn, hidden),
        "fc2": (hidden, ffn),
    }


def bf16_parts(n: int, k: int) -> dict[str, Callable[[], Any]]:
    """BF16's three products, as Megatron-Core's linear calls them."""
    x, w, dy, main = *operands(n, k), torch.zeros(n, k)

    def wgrad() -> None:
        main.add_(dy.t().matmul(x))

    return {
        "fprop": partial(torch.nn.functional.linear, x, w),
        "dgrad": partial(torch.matmul, dy, w),
        "wgrad": wgrad,
    }


def operands(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [TOKENS, K], w [N, K], dy [TOKENS, N]: bfloat16, normal, the same each time."""
    generator = torch.Generator().manual_seed(n + k)
    scales = ((TOKENS, k), 1.0), ((n, k), 0.02), ((TOKENS, n), 1e-4)
    x, w, dy = ((torch.randn(shape, generator=generator) * by).bfloat16() for shape, by in scales)
    return x, w, dy


def fp8_parts(name: str, n: int, k: int) -> dict[str, Callable[[], Any]]:
    """A recipe's products and casts, as a linear of the step calls them."""
    recipe, main = CLASSES[name](), torch.zeros(n, k)
    cast: dict[str, Callable[[], Any]] = {}
    made: list[tuple[QuantizedSide, QuantizedSide]] = []
    for role, x in zip(("input", "weight", "grad_output"), operands(n, k), strict=True):
        rule = recipe.rule(role)
        assert rule is not None
        scale = rule.fmt.max / x.abs().max().float() if rule.delayed else None
        run = partial(emulated.quantize, x, rule, "both", scale=scale)
        cast["gradient" if role == "grad_output" else role] = run
        rowwise, columnwise = run().tensor.sides
        assert rowwise is not None and columnwise is not None
        made.append((rowwise, columnwise))
    (x_row, x_col), (w_row, w_col), (dy_row, dy_col) = made
    return {
        "fprop": partial(emulated.gemm, x_row, w_row, out_dtype=torch.bfloat16),
        "dgrad": partial(emulated.gemm, dy_row, w_col, out_dtype=torch.bfloat16),
        "wgrad": partial(emulated.accumulate, dy_col, x_col, main),
        **cast,
    }


def measure(hidden: int, recipes: list[str], args: Any) -> list[list[str]]:
    """Rows of the table: a linear and a recipe each."""
    rows = []
    clock = clock_of(args)[0]
    for linear, (n, k) in linears(hidden).items():
        contenders = {("bf16", part): run for part, run in bf16_parts(n, k).items()}
        for recipe in recipes:
            contenders |= {(recipe, part): run for part, run in fp8_parts(recipe, n, k).items()}
        done = interleave({str(key): run for key, run in contenders.items()}, args.repetitions, clock=clock)
        times = {key: statistics.median(done[str(key)].seconds) for key in contenders}
        whole = sum(times["bf16", part] for part in PARTS[:3])
        rows.append(
            [f"{hidden} {linear} {n} x {k}", "bf16, us"]
            + [f"{times['bf16', part] * 1e6:.0f}" for part in PARTS[:3]]
            + ["", "", "", f"{whole * 1e6:.0f}"]
        )
        for recipe in recipes:
            of = [times[recipe, part] for part in PARTS]
            base = [times["bf16", part] for part in PARTS[:3]] + [whole] * 3
            rows.append(
                ["", recipe]
                + [f"{a / b:.2f}" for a, b in zip(of, base, strict=True)]
                + [f"{sum(of) / whole:.2f}"]
            )
    return rows


def main() -> int:
    """Time and print."""
    parser = argument_parser((__doc__ or "").splitlines()[0], repetitions=31)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--hidden", nargs="+", type=int, default=list(HIDDEN), choices=HIDDEN)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    record = environment([])
    record["measured"] = clock_of(args)[1]
    amx = emulation.inner_loop() == emulation.AMX
    print(describe(record), "with AMX" if amx else "without AMX", flush=True)
    rows = []
    for hidden in args.hidden:
        rows += measure(hidden, args.recipes, args)
    body = table(["weight", "recipe", *PARTS, "all"], rows)
    print(body)
    if args.write:
        name = "step_parts" if amx else "step_parts_avx512"
        write_results(name, "A training step's products and casts on CPU", command_line(), record, body, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
