"""Emulated FP8's inner loops in C, for CPU tensors: cast, block amax and decode, 3 to 10 times torch's speed.

The C sources are compiled by the machine's own C compiler when the first large tensor needs them (library.py). Where
that fails, ``reason()`` says why and callers keep to torch operations: the same codes, the same values, and GEMMs that
differ by their order of summation.

C trusts what it is handed, so every tensor's address goes through ``address``, which checks the tensor first, and every
tensor made here names its dtype and device: torch's defaults for both may be anything.

Rejected: torch.utils.cpp_extension (needs ninja, a C++ compiler and a minute). Rejected: wheels with binaries, which
would have to guess the vector width.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import library

SOURCES = [
    Path(__file__).with_name(name) for name in ("loops.c", "blocks.c", "gemm.c", "few_rows.c", "figures.c")
]
# No -ffast-math: only what changes no result. Compilers vectorise selects of float products without trapping math.
FLAGS = (
    "-std=gnu11 -O3 -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared"
)
MIN_ELEMENTS = 1 << 10
"""Elements. Smaller tensors are left to torch: C need not be compiled for them."""
MIN_PRODUCT = 1 << 14
"""Elements of both operands. Packing smaller ones for the GEMM takes longer than torch's product."""
MAX_THREADS = 1024
"""Threads at most. Asked for many more, torch's thread pool and OpenMP end the process."""
_THREAD_ELEMENTS = 1 << 15
FLOATS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
"""The dtypes that are cast -> the integer dtype of their size, and the bits of Inf."""
NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


_TYPES = {"p": ctypes.c_void_p, "q": ctypes.c_int64, "i": ctypes.c_int32, "u": ctypes.c_uint32}
_ARGUMENTS = {"cast": "ppqqpqqi", "decode": "ppqqpqqi", "quantize": "ppqupppi", "finish": "ppqqpppi"}
"""What the functions take that there are for several dtypes."""


class _Cut(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_int64), ("cols", ctypes.c_int64), ("largest", ctypes.c_void_p))


def usable(x: torch.Tensor) -> bool:
    """Whether x is for these kernels: ``plain`` and large, on a machine that could compile them."""
    return x.numel() >= MIN_ELEMENTS and plain(x) and reason() is None


def plain(x: torch.Tensor) -> bool:
    """Whether C can read x: a plain, contiguous CPU tensor, its numbers in its memory (in_memory)."""
    return (
        x.is_cpu
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.is_contiguous()
        and not (x.is_neg() or x._is_zerotensor())
    )


def reason() -> str | None:
    """Why there are no compiled kernels on this machine; None if there are. Compiles them if nobody has."""
    return _load()[1]


def cast(
    x: torch.Tensor, scale: torch.Tensor | None, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Codes of x times the scale of its block, as ``numerics.cast.cast`` gives them.

    Args:
        x: contiguous; float32, bfloat16 or float16; [rows, cols], or any shape under one scale.
        scale: float32, one for each block, row-major; None means 1.
        block: (rows, cols) that share a scale, 0 meaning the whole extent.
        dtype: float8_e4m3fn or float8_e5m2.
    """
    codes = torch.empty(x.shape, dtype=dtype, device="cpu")
    _elementwise(_function("cast", dtype, x.dtype), x, codes, scale, block)
    return codes


def decode(
    codes: torch.Tensor, scale: torch.Tensor | None, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """codes times the scale of their block, the product in float32, rounded once to dtype: bfloat16 or float32.

    Args as in ``cast``. A NaN code gives the canonical quiet NaN of dtype, Inf codes give Inf.
    """
    values = torch.empty(codes.shape, dtype=dtype, device="cpu")
    _elementwise(_function("decode", codes.dtype, dtype), codes, values, scale, block)
    return values


def _elementwise(
    function: Callable[..., None],
    x: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | None,
    block: tuple[int, int],
) -> None:
    if x.numel() == 0:
        return
    rows, cols = x.shape if x.ndim == 2 else (1, x.numel())
    block_rows, block_cols = block[0] or rows, block[1] or cols
    scales = None
    if scale is not None:
        scale = scale.contiguous()
        scales = address(scale, torch.float32, -(-rows // block_rows) * -(-cols // block_cols))
    to = address(out, out.dtype, rows * cols)
    threads = thread_count(x.numel())
    function(address(x, x.dtype, rows * cols), to, rows, cols, scales, block_rows, block_cols, threads)


def quantize(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """A tensor under a scale that was there before it, in one pass over memory.

    Args:
        x: contiguous; float32, bfloat16 or float16; not empty.
        scale: float32 [], finite and positive.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        codes as of ``cast``; float32 [], the scale's inverse; float32 [], the amax (NaN ignored, Inf kept); and how many
        elements are NaN or Inf.
    """
    codes = torch.empty(x.shape, dtype=dtype, device="cpu")
    inverse, amax = (torch.empty((), dtype=torch.float32, device="cpu") for _ in range(2))
    n = x.numel()
    nonfinite = _function("quantize", dtype, x.dtype)(
        address(x, x.dtype, n),
        address(codes, dtype, n),
        n,
        FLOATS[x.dtype][1],
        address(scale, torch.float32, 1),
        address(inverse, torch.float32, 1),
        address(amax, torch.float32, 1),
        thread_count(n),
    )
    return codes, inverse, amax, nonfinite


def finish(
    sums: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """sums * (scale_a * scale_b) + bias in float32, rounded once to dtype; the memory of sums is used where it can be.

    Args:
        sums: float32 [M, N], contiguous.
        scale_a, scale_b: float32 [].
        bias: float32 [N], contiguous; None: 0.
        dtype: bfloat16 or float32.
    """
    rows, cols = sums.shape
    out = sums if dtype == torch.float32 else torch.empty(rows, cols, dtype=dtype, device="cpu")
    _function("finish", dtype)(
        address(sums, torch.float32, rows * cols),
        address(out, dtype, rows * cols),
        rows,
        cols,
        address(scale_a, torch.float32, 1),
        address(scale_b, torch.float32, 1),
        None if bias is None else address(bias, torch.float32, cols),
        thread_count(sums.numel()),
    )
    return out


def block_amaxes(x: torch.Tensor, blocks: Sequence[tuple[int, int]]) -> tuple[list[torch.Tensor], int]:
    """As ``numerics.scaling.block_amaxes`` of a contiguous matrix; (amaxes, how many elements are NaN or Inf)."""
    rows, cols = x.shape
    integer, inf = FLOATS[x.dtype]
    unit = math.lcm(*(r for r, _ in blocks if r))  # no block of rows is shared by two threads
    threads = thread_count(x.numel())
    largest = [
        torch.zeros(
            -(-rows // r) if r else threads, -(-cols // (c or max(cols, 1))), dtype=integer, device="cpu"
        )
        for r, c in blocks
    ]
    cuts = [
        _Cut(r, c or max(cols, 1), address(found, integer, found.numel()))
        for (r, c), found in zip(blocks, largest, strict=True)
    ]
    kernel = compiled().amax32 if integer == torch.int32 else compiled().amax16
    kernel.restype = ctypes.c_int64
    nonfinite = kernel(
        address(x, x.dtype, rows * cols),
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


def e8m0_of_amax(amax: torch.Tensor, max_exponent: int) -> torch.Tensor:
    """As ``numerics.scaling.compute_e8m0``: uint8, amax's shape; max_exponent is the format's."""
    n = amax.numel()
    e8m0 = torch.empty(amax.shape, dtype=torch.uint8, device="cpu")
    compiled().e8m0_of_amax(
        address(amax, torch.float32, n), address(e8m0, torch.uint8, n), ctypes.c_int64(n), max_exponent
    )
    return e8m0


def power_of_e8m0(e8m0: torch.Tensor, inverse: bool) -> torch.Tensor:
    """float32 2^(e8m0 - 127) of uint8 exponents, or 2^(127 - e8m0); NaN of 0xFF."""
    n = e8m0.numel()
    power = torch.empty(e8m0.shape, dtype=torch.float32, device="cpu")
    compiled().power_of_e8m0(
        address(e8m0, torch.uint8, n), address(power, torch.float32, n), ctypes.c_int64(n), int(inverse)
    )
    return power


def address(x: torch.Tensor, dtype: torch.dtype, elements: int) -> ctypes.c_void_p:
    """Where x lies, for C, which trusts it; AssertionError unless it is so many elements of dtype, dense, on the CPU."""
    if x.dtype != dtype or x.numel() != elements or not x.is_cpu or not x.is_contiguous():
        raise AssertionError(
            f"{elements} contiguous elements of {dtype} on the CPU are needed, got {described(x)}"
        )
    return ctypes.c_void_p(x.data_ptr())


def described(x: torch.Tensor) -> str:
    """What a message says of a tensor."""
    return f"{list(x.shape)}, strides {list(x.stride())}, {x.dtype} on {x.device}"


def thread_count(elements: int) -> int:
    """How many threads so many elements are worth."""
    return max(1, min(torch.get_num_threads(), MAX_THREADS, elements // _THREAD_ELEMENTS))


def compiled() -> ctypes.CDLL:
    """The kernels; only where ``reason()`` is None."""
    loaded, why = _load()
    assert loaded is not None, why
    return loaded


@cache
def _function(kind: str, *dtypes: torch.dtype) -> Callable[..., Any]:
    """The one of a kind that is for these dtypes; looked up once."""
    function = getattr(compiled(), "_".join([kind, *(NAMES[dtype] for dtype in dtypes)]))
    function.argtypes = [_TYPES[argument] for argument in _ARGUMENTS[kind]]
    function.restype = ctypes.c_int64 if kind == "quantize" else None
    return function


@cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """(the library, None), or (None, why there is none)."""
    return library.load(SOURCES, FLAGS)
