"""The C kernels are compiled by the first process that needs them; where they cannot be, torch gives the same codes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.support.fork_server import python

QUANTISE = """
import hashlib
import torch
from megatron_fp8.kernels.cast_dispatch import cast
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.kernels.cpu import emulation as cpu
print(cpu._load.cache_info().currsize)  # after the imports
cpu.FLAGS = cpu.FLAGS.replace("-O3", "-O0")  # it is not the compiler that is tried
codes = cast(torch.linspace(-500, 500, 1 << 15), None, E4M3).view(torch.uint8)
print(hashlib.sha256(codes.numpy()).hexdigest())
print(cpu.reason())
"""


def quantized(folder: Path, cache: str, environment: dict[str, str]) -> list[str]:
    """What a process prints, with an empty cache or one that another process fills now."""
    variables = {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(folder / cache), **environment}
    done = python(str(folder / "quantize.py"), env=variables, timeout=200)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.splitlines()


def test_processes_that_compile_at_once_and_machines_that_cannot(tmp_path):
    """Two ranks share one empty cache; one has a compiler that fails, one has none. All codes are equal."""
    broken = tmp_path / "cc"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "emulation.c:1: error: broken" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    (tmp_path / "quantize.py").write_text(QUANTISE)
    compilers = {"shared": [None, None], "a": ["false"], "b": ["/not/there/cc"], "c": [str(broken)]}
    with ThreadPoolExecutor() as pool:
        started = [
            pool.submit(quantized, tmp_path, cache, {"CC": compiler} if compiler else {})
            for cache, wanted in compilers.items()
            for compiler in wanted
        ]
        results = [process.result() for process in started]
    assert {loaded for loaded, _, _ in results} == {"0"}, "an import compiles nothing"
    assert len({codes for _, codes, _ in results}) == 1
    assert [why for _, _, why in results[:2]] == ["None", "None"]
    assert "false --version exits with 1" in results[2][2]
    assert "/not/there/cc is not there; install one or set CC" in results[3][2]
    assert "cannot compile the kernels: emulation.c:1: error: broken" in results[4][2]
    left = [path.name for path in (tmp_path / "shared" / "megatron_fp8" / "kernels").iterdir()]
    assert len(left) == 1 and left[0].startswith("cpu-") and left[0].endswith(".so"), left
