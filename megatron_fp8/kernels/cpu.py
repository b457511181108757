"""Emulated FP8's inner loops in C, for CPU tensors: cast, block amax and decode, 3 to 10 times torch's speed; a GEMM.

cpu.c and gemm.c are compiled once, by the machine's own C compiler (``CC``, else ``cc``) for its own processor, when the
first large tensor needs them. The result is kept under the user's cache folder by the hash of all that went into it.
Where that fails, ``reason()`` says why and callers keep to torch operations: the same codes, the same values, and GEMMs
that differ by their order of summation.

Rejected: torch.utils.cpp_extension (needs ninja, a C++ compiler and a minute). Rejected: wheels with binaries, which
would have to guess the vector width.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

SOURCES = [Path(__file__).with_name(name) for name in ("cpu.c", "gemm.c")]
# No -ffast-math: only what changes no result. Compilers vectorise selects of float products without trapping math.
FLAGS = (
    "-std=gnu11 -O3 -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared"
)
MIN_ELEMENTS = 1 << 14
"""Smaller tensors are left to torch: nothing is gained, and nothing need be compiled for them."""
_THREAD_ELEMENTS = 1 << 15
_BITS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


class _Cut(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_int64), ("cols", ctypes.c_int64), ("largest", ctypes.c_void_p))


def usable(x: torch.Tensor) -> bool:
    """Whether x is for these kernels: a plain, contiguous, large CPU tensor, on a machine that could compile them."""
    return (
        x.device.type == "cpu"
        and x.numel() >= MIN_ELEMENTS
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.is_contiguous()
        and reason() is None
    )


def reason() -> str | None:
    """Why there are no compiled kernels on this machine; None if there are. Compiles them if nobody has."""
    return _load()[1]


def cast(
    x: torch.Tensor, scale: torch.Tensor | None, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Codes of x times the scale of its block, as ``megatron_fp8.cast.cast`` gives them.

    Args:
        x: contiguous; float32, bfloat16 or float16; [rows, cols], or any shape under one scale.
        scale: float32, one for each block, row-major; None means 1.
        block: (rows, cols) that share a scale, 0 meaning the whole extent.
        dtype: float8_e4m3fn or float8_e5m2.
    """
    codes = torch.empty(x.shape, dtype=dtype, device="cpu")
    _elementwise(f"cast_{_NAMES[dtype]}_{_NAMES[x.dtype]}", x, codes, scale, block)
    return codes


def decode(
    codes: torch.Tensor, scale: torch.Tensor | None, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """codes times the scale of their block, the product in float32, rounded once to dtype: bfloat16 or float32.

    Args as in ``cast``. NaN and Inf codes give NaN and Inf.
    """
    values = torch.empty(codes.shape, dtype=dtype, device="cpu")
    _elementwise(f"decode_{_NAMES[codes.dtype]}_{_NAMES[dtype]}", codes, values, scale, block)
    return values


def _elementwise(
    name: str, x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None, block: tuple[int, int]
) -> None:
    assert x.is_contiguous(), "the kernels know no strides"
    rows, cols = x.shape if x.ndim == 2 else (1, x.numel())
    scale = torch.ones((), dtype=torch.float32, device="cpu") if scale is None else scale.contiguous()
    block_rows, block_cols = block[0] or max(rows, 1), block[1] or max(cols, 1)
    blocks = -(-rows // block_rows) * -(-cols // block_cols)
    assert scale.dtype == torch.float32 and scale.numel() >= blocks, "one float32 scale for each block"
    getattr(_library(), name)(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(rows),
        ctypes.c_int64(cols),
        ctypes.c_void_p(scale.data_ptr()),
        ctypes.c_int64(block_rows),
        ctypes.c_int64(block_cols),
        _threads(x.numel()),
    )


def block_amaxes(x: torch.Tensor, blocks: Sequence[tuple[int, int]]) -> tuple[list[torch.Tensor], int]:
    """As ``megatron_fp8.scaling.block_amaxes`` of a contiguous matrix; (amaxes, how many elements are NaN or Inf)."""
    rows, cols = x.shape
    assert x.is_contiguous(), "the kernels know no strides"
    integer, inf = _BITS[x.dtype]
    unit = math.lcm(*(r for r, _ in blocks if r))  # no block of rows is shared by two threads
    threads = _threads(x.numel())
    largest = [
        torch.zeros(
            -(-rows // r) if r else threads, -(-cols // (c or max(cols, 1))), dtype=integer, device="cpu"
        )
        for r, c in blocks
    ]
    cuts = [
        _Cut(r, c or max(cols, 1), found.data_ptr()) for (r, c), found in zip(blocks, largest, strict=True)
    ]
    kernel = _library().amax32 if integer == torch.int32 else _library().amax16
    kernel.restype = ctypes.c_int64
    nonfinite = kernel(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(rows),
        ctypes.c_int64(cols),
        ctypes.c_uint32(inf),
        (_Cut * len(cuts))(*cuts),
        len(cuts),
        ctypes.c_int64(unit),
        threads,
    )
    if nonfinite < 0:
        raise MemoryError(f"no memory for a row of {cols} elements")
    for i, (block_rows, _) in enumerate(blocks):
        if block_rows == 0:
            largest[i] = largest[i].amax(0, keepdim=True)
    return [found.view(x.dtype).to(torch.float32) for found in largest], nonfinite


def multiplies(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``matmul`` is for operands like these: not small, on a CPU with AVX512-BF16 and without AMX."""
    return a.device.type == b.device.type == "cpu" and a.numel() + b.numel() >= MIN_ELEMENTS and has_matmul()


def has_matmul() -> bool:
    """Whether this processor has the instruction for which gemm.c is written, and the kernels could be compiled."""
    return reason() is None and bool(_library().has_gemm())


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 [M, N] = a [M, K] @ b [N, K]^T of bfloat16 matrices of any strides.

    Products are exact, sums are float32 in an order that does not depend on M, N or the number of threads. NaN and Inf
    go where IEEE has them; subnormal operands count as zero.
    """
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty(m, n, dtype=torch.float32, device="cpu")
    if not (m and n and k):
        return c.zero_()
    failed = _library().gemm(
        *(_strided(a) + _strided(b)),
        ctypes.c_void_p(c.data_ptr()),
        *(ctypes.c_int64(size) for size in (m, n, k)),
        _threads(max(a.numel(), b.numel(), c.numel())),
    )
    if failed:
        raise MemoryError(f"no memory to pack matrices of {m} x {k} and {n} x {k}")
    return c


def _strided(x: torch.Tensor) -> list[ctypes.c_void_p | ctypes.c_int64]:
    return [ctypes.c_void_p(x.data_ptr()), *(ctypes.c_int64(step) for step in x.stride())]


def e8m0_of_amax(amax: torch.Tensor, max_exponent: int) -> torch.Tensor:
    """As ``megatron_fp8.scaling.compute_e8m0``: uint8, amax's shape; max_exponent is the format's."""
    e8m0 = torch.empty(amax.shape, dtype=torch.uint8, device="cpu")
    size = ctypes.c_int64(amax.numel())
    _library().e8m0_of_amax(
        ctypes.c_void_p(amax.data_ptr()), ctypes.c_void_p(e8m0.data_ptr()), size, max_exponent
    )
    return e8m0


def power_of_e8m0(e8m0: torch.Tensor, inverse: bool) -> torch.Tensor:
    """float32 2^(e8m0 - 127) of uint8 exponents, or 2^(127 - e8m0)."""
    power = torch.empty(e8m0.shape, dtype=torch.float32, device="cpu")
    size = ctypes.c_int64(e8m0.numel())
    _library().power_of_e8m0(
        ctypes.c_void_p(e8m0.data_ptr()), ctypes.c_void_p(power.data_ptr()), size, int(inverse)
    )
    return power


def _threads(elements: int) -> int:
    return max(1, min(torch.get_num_threads(), elements // _THREAD_ELEMENTS))


# ------------------------------------------------------------------------------------------------------------ compiling


def _library() -> ctypes.CDLL:
    library, why = _load()
    assert library is not None, why
    return library


@cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """(the library, None), or (None, why there is none)."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60)
        if version.returncode:
            return None, f"no C compiler: {shlex.join(compiler)} --version exits with {version.returncode}"
        return ctypes.CDLL(str(_compiled(compiler, version.stdout))), None
    except FileNotFoundError as error:
        return None, f"no C compiler: {error.filename} is not there; install one or set CC"
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()
        return None, f"{compiler[0]} cannot compile the kernels: {lines[0] if lines else error}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"kernels not compiled: {error}"


def _compiled(compiler: list[str], version: str) -> Path:
    """The shared library, compiled if the cache has none. Many ranks may do so at once: the last rename wins."""
    key = hashlib.sha256(
        "\0".join(
            [*compiler, version, FLAGS, *(source.read_text() for source in SOURCES), _processor()]
        ).encode()
    ).hexdigest()[:16]
    folder = cache_folder()
    library = folder / f"cpu-{key}.so"
    if not library.exists():
        handle, unfinished = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            command = [*compiler, *FLAGS.split(), *map(str, SOURCES), "-o", unfinished]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
            os.replace(unfinished, library)
        finally:
            Path(unfinished).unlink(missing_ok=True)
    return library


def cache_folder() -> Path:
    """Where compiled kernels are kept: this user's cache folder, or one for this process if that cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "megatron_fp8", "kernels")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="megatron_fp8-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="megatron_fp8-"))


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(named)])
