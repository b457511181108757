"""`megatron-fp8 bench`: FP8 against BF16 on this machine.

FP8 against BF16 on this machine, from a cast to a training step. A CPU and a GPU print the same table.

  megatron-fp8 bench                                        every recipe, one shape that suits the device
  megatron-fp8 bench --recipe mxfp8 --shape 4096x14336x8192  one recipe; in features x out features x tokens
  megatron-fp8 bench --config llama3_8b    the shapes, recipe and backend of a run
  megatron-fp8 bench --only all --json > today.json         all sections, as data (the table goes to stderr)
  megatron-fp8 bench --compare last_week.json               changes beyond the noise of both measurements
  megatron-fp8 bench --tune --config my.yaml --out table.json    for --model.fp8_size_filter=table.json

  quantise     both directions of a linear's input, against a copy in BF16
  gemm         the product of codes
  linear       forward and backward with all quantization
  layer        a Llama-like layer, forward and backward: K is the hidden size, N the feed-forward
  step         a training step of two layers: forward, backward, AdamW, the end of the iteration
  inference    the forward of a layer whose weights were quantized once

--tune finds the GEMMs for which FP8 does not pay. Its table is for one device, recipe and backend; shapes that it lacks
use the next smaller one. Options of the run, as in `train`, may follow --config: --model.fp8_recipe=mxfp8.

`x BF16` is time over BF16's time: less than 1 is faster. The weight is quantized anew in every linear, as in a run with
one microbatch. On a GPU, Python's launches count. On a CPU FP8 is emulated, which is more work. `spread` is the
interquartile range of that ratio, relative.

Exit codes: 0 done, 1 a result was wrong, 2 bad input.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from .cli_common import CommandParser, check_output, run

DEFAULT = ("quantise", "gemm", "linear")
"""Default sections: they take seconds on a CPU."""


def main(arguments: list[str]) -> int:
    """Measure, print and write results; return 0, 1 if a result was wrong, 2 for bad input."""
    return run(_parser(), arguments, _bench, run_options=True)


def _bench(options: Namespace, run_options: list[str]) -> None:
    from ..study.bench import bench

    if options.out:
        check_output("--out", options.out)
    bench(options, run_options)


def _parser() -> CommandParser:
    parser = CommandParser("bench", __doc__)
    add = parser.add_argument
    add("--only", default=",".join(DEFAULT), help="sections by commas, or all (default %(default)s)")
    add("--recipe", help="recipes, separated by commas (default: all; with --tune: tensorwise)")
    add("--fp8", default="hybrid", help="element formats, hybrid or e4m3 (default %(default)s)")
    add("--backend", help="emulated or native (default: the best that can run here)")
    add("--shape", action="append", metavar="KxNxTOKENS", help="a GEMM to measure; may be given again")
    add("--config", metavar="FILE", help="a run's config: its shapes on one rank, recipe and backend")
    add("--tune", action="store_true", help="write the table for fp8_size_filter to --out")
    add("--out", metavar="FILE", help="write the results (with --tune: the table) as JSON")
    add("--json", action="store_true", help="print the results as JSON on stdout, all else on stderr")
    add("--compare", metavar="OLD.json", type=Path, help="an earlier --out: changes beyond noise")
    add("--peers", action="store_true", help="measure torchao's linear too, if it is installed")
    add("--repetitions", type=int, default=20, help="timed rounds (default %(default)s)")
    add("--threads", type=int, default=0, help="CPU threads (default: torch's)")
    return parser
