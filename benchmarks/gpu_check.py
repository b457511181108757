"""Is native FP8 right on this GPU? `python -m benchmarks.gpu_check`, or `make gpu-check`: PASS, FAIL, or why not run.

    python -m benchmarks.gpu_check                         # what fits into nine minutes, in order of what decides most
    python -m benchmarks.gpu_check --resume                # go on: what is not yet run, then what failed
    python -m benchmarks.gpu_check --minutes 4 --out DIR   # another budget, another folder for the three result files
    python -m benchmarks.gpu_check --only gemm,training    # checks with one of the words in their name
    python -m benchmarks.gpu_check --dry-run               # the same on a CPU, small, with the emulated backend

Kernels are compiled first, on all cores. Then, each group in a process of its own: digests, codes, products, no waiting;
the benchmark's roofline, products and quantization; gradients, CUDA graphs, captured steps, scale updates, masters;
attention's kernels by blocks; training and fused layers on Megatron-Core, where it is installed; torch.compile;
Transformer Engine, where it is installed; compute-sanitizer. A process that dies or hangs costs its check; the next ones
have a new process. Results are on disk after every check: gpu_check.json, .md to be read, .log with all that the
processes wrote.

Codes and scales must be the specified ones to the bit; products are held to bounds of their accumulation; training must
follow the emulated backend's on the same device. Exit code 1 if a check failed or none passed, 2 for bad input, 3 without
a GPU.
"""

from __future__ import annotations

from benchmarks import gpu_command, gpu_plan


def main(arguments: list[str] | None = None) -> int:
    """Run the checks; the exit code."""
    return gpu_command.main("gpu_check", "GPU check", __doc__ or "", gpu_plan.CHECK, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
