"""Element casts against ml_dtypes, and MXFP8 quantize + dequantize against torchao: `python benchmarks/cast.py`.

Bytes are compared before any time is taken. Goals: casts >= 15 x ml_dtypes, MXFP8 >= 2 x torchao.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx

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
from megatron_fp8 import quantize
from megatron_fp8.kernels.cast_dispatch import cast, decode
from megatron_fp8.numerics.formats import E4M3, E5M2, FloatFormat
from megatron_fp8.recipe import MXFP8BlockScaling

SHAPES = [(1024, 4096), (4096, 4096)]
ML_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
GOAL_CAST, GOAL_MX = 15.0, 2.0
Pair = tuple[Callable[[], Any], Callable[[], Any]]


def element_pair(fmt: FloatFormat, shape: tuple[int, int]) -> Pair:
    """float32 -> codes -> float32, here and in ml_dtypes; ml_dtypes does not saturate, the data does not ask it to."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 10
    array, dtype = x.numpy(), ML_DTYPES[fmt.name]

    def ours() -> torch.Tensor:
        return decode(cast(x, None, fmt))

    def theirs() -> np.ndarray:
        return array.astype(dtype).astype(np.float32)

    same = np.array_equal(ours().numpy().view(np.int32), theirs().view(np.int32))
    assert same, f"{fmt.name}: codes differ from ml_dtypes; no time is printed for a wrong result"
    return ours, theirs


def mx_pair(dtype: torch.dtype, shape: tuple[int, int]) -> Pair:
    """Matrix -> MXFP8 codes and scales -> matrix of the same dtype, here and in torchao (both round scales up)."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    recipe = MXFP8BlockScaling()

    def ours() -> torch.Tensor:
        return quantize(x, recipe, "input").dequantize()

    def theirs() -> torch.Tensor:
        scale, codes = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
        return to_dtype(codes, scale, torch.float8_e4m3fn, 32, dtype)

    side = quantize(x, recipe, "input").rowwise
    scale, codes = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    assert side is not None and torch.equal(side.codes.view(torch.uint8), codes.view(torch.uint8).view(shape))
    assert torch.equal(side.scale_inv.view(torch.uint8), scale.view(torch.uint8).view(side.scale_inv.shape))
    assert torch.equal(ours(), theirs().view(shape)), "MXFP8 differs from torchao; no time is printed"
    return ours, theirs


def main() -> int:
    """Gate, time, print; exit code 1 where a goal is missed."""
    parser = argument_parser(__doc__.splitlines()[0], repetitions=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    clock, measured = clock_of(args)
    record = environment(["torchao", "ml_dtypes", "numpy"])
    record["measured"] = measured
    print(describe(record), flush=True)
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    for shape in SHAPES:
        cases: list[tuple[str, str, float, Pair]] = [
            ("E4M3 encode + decode, float32", "ml_dtypes", GOAL_CAST, element_pair(E4M3, shape)),
            ("E5M2 encode + decode, float32", "ml_dtypes", GOAL_CAST, element_pair(E5M2, shape)),
            ("MXFP8 quantize + dequantize, bfloat16", "torchao", GOAL_MX, mx_pair(torch.bfloat16, shape)),
            ("MXFP8 quantize + dequantize, float32", "torchao", GOAL_MX, mx_pair(torch.float32, shape)),
        ]
        for name, peer, goal, (ours, theirs) in cases:
            times = interleave({"ours": ours, peer: theirs}, args.repetitions, clock=clock)
            ratio, spread = times[peer].ratio_to(times["ours"])
            gelem = shape[0] * shape[1] / times["ours"].median / 1e9
            rows.append(
                [
                    name,
                    f"{shape[0]}x{shape[1]}",
                    f"{times['ours'].median * 1e3:.2f}",
                    f"{gelem:.2f}",
                    f"{peer} {times[peer].median * 1e3:.2f}",
                    f"{ratio:.1f}x",
                    f"{spread:.0%}",
                    f">= {goal:g}x {'met' if ratio >= goal else 'MISSED'}",
                ]
            )
            data.append(
                {
                    "case": name,
                    "shape": shape,
                    "peer": peer,
                    "seconds": {k: t.seconds for k, t in times.items()},
                    "ratio": ratio,
                    "spread": spread,
                    "goal": goal,
                }
            )
    header = ["case", "shape", "ours ms", "Gelem/s", "peer ms", "faster by", "spread", "goal"]
    body = table(header, rows)
    print(body)
    if args.write:
        write_results("cast", "Casts on CPU", command_line(), record, body, data)
    return int(any(d["ratio"] < d["goal"] for d in data))


if __name__ == "__main__":
    raise SystemExit(main())
