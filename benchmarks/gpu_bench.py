"""How fast is FP8 on this GPU? `python -m benchmarks.gpu_bench`, or `make gpu-bench`: medians against BF16.

    python -m benchmarks.gpu_bench                      # roofline, gemm, quantise, fused, linear, layer, step
    python -m benchmarks.gpu_bench --resume             # go on with the sections that are not yet measured
    python -m benchmarks.gpu_bench --only gemm,layer    # some of them
    python -m benchmarks.gpu_bench --dry-run            # the same on a CPU, small, with the emulated backend

Everything is compared with BF16 in the same process; contenders take turns, with a cold L2 and CUDA events. Before
anything is timed its result is compared with BF16's; a wrong one is not timed, and exit code 1 says so. Cells that were
not measured say why. Each section has a process of its own and a time box, within --minutes in all; every row is on disk
as soon as it is measured: gpu_bench.json, .md to be read, .log with all that the processes wrote. The goals are in
benchmarks/gpu_sections.py.
"""

from __future__ import annotations

from benchmarks import gpu_command, gpu_plan


def main(arguments: list[str] | None = None) -> int:
    """Run the sections; the exit code."""
    return gpu_command.main("gpu_bench", "GPU benchmark", __doc__ or "", gpu_plan.BENCH, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
