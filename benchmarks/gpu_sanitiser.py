"""The check that runs every kernel and kind of product under compute-sanitizer's memcheck.

compute-sanitizer python -m benchmarks.gpu_sanitiser        what it runs
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import torch

from benchmarks import gpu_fused
from benchmarks.gpu_checks import random
from benchmarks.gpu_common import RECIPES, Machine, NotRun, open_machine
from benchmarks.gpu_environment import ROOT
from megatron_fp8.recipe import GEMM_OPERANDS

FOUND = 9
"""The exit code by which the sanitiser says that it found something."""
TRIAL = "import torch; torch.zeros(8, device='cuda').sum().item()"


def checks() -> dict[str, Callable[[Machine], str]]:
    """The one check."""
    return {"sanitiser": sanitiser}


def sanitiser(machine: Machine) -> str:
    """Nothing is read or written outside its memory. Where the tool does not run at all, neither does this check."""
    if machine.dry:
        raise NotRun("needs a GPU")
    tool = sanitiser_path()
    if tool is None:
        raise NotRun("compute-sanitizer is not installed")
    run = _under(tool, ["-m", "benchmarks.gpu_sanitiser"])
    lines = (run.stdout + run.stderr).strip().splitlines()
    if run.returncode not in (0, FOUND):
        trial = _under(tool, ["-c", TRIAL])
        if trial.returncode:
            said = (trial.stdout + trial.stderr).strip().splitlines() or ["it said nothing"]
            raise NotRun(f"compute-sanitizer does not run here, not even around one addition: {said[-1]}")
    marked = [line for line in lines if line.startswith("=====")]
    assert run.returncode == 0, "\n".join(marked[:12] if run.returncode == FOUND else lines[-12:])
    errors = [line for line in lines if "ERROR SUMMARY" in line]
    return errors[-1].strip("= ") if errors else "clean"


def sanitiser_path() -> str | None:
    """Where compute-sanitizer is: on the PATH, or in a CUDA toolkit."""
    places = [os.environ.get("CUDA_HOME", ""), *sorted(glob.glob("/usr/local/cuda*"))]
    return next(filter(None, (shutil.which("compute-sanitizer", path=p) for p in _folders(places))), None)


def _folders(places: list[str]) -> list[str]:
    return [os.environ.get("PATH", ""), *(f"{place}/bin" for place in places if place)]


def _under(tool: str, program: list[str]) -> subprocess.CompletedProcess[str]:
    # What CUDA calls return is their callers' business: torch asks for things that may fail, and goes on.
    options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", str(FOUND)]
    return subprocess.run(
        [tool, *options, sys.executable, *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


def small(machine: Machine) -> None:
    """What runs under the sanitiser: each kernel and each kind of product, on small odd matrices."""
    x = random(machine, 70, 200, seed=1)
    for chosen in RECIPES.values():
        if machine.backend.supports(machine.device, chosen) is None:
            for roles in GEMM_OPERANDS.values():
                a, b = (machine.backend.quantize(x, chosen.rule(role), "both").tensor for role in roles)
                machine.backend.gemm(a.rowwise, b.rowwise, out_dtype=torch.bfloat16)
                machine.backend.gemm(a.columnwise, b.columnwise)
    if not machine.dry:
        gpu_fused.small(machine)
    machine.synchronize()


if __name__ == "__main__":
    small(open_machine("--dry-run" in sys.argv[1:]))
