"""Inner loops of emulated FP8 in C: cast, decode, product. They take a third to a tenth of torch's time.

The machine's own C compiler compiles the C sources when the first large tensor needs them (library.py). If that fails,
``reason()`` returns why, and callers use torch operations: the same codes and values, and GEMMs that differ by their
order of summation.

C does not check its arguments, so every tensor's address goes through ``address``, which checks the tensor first. Every
tensor made here names its dtype and device, because torch's defaults may have been changed.

Products (gemm.c) decode codes while the GEMM packs its panels. Inner loops are compiled for the processor's
instructions: AMX, AVX512-BF16, and float32 (AVX2, AVX512, Arm; gemm_float32.c). Products use the first of these, except
AMX if ``ONEDNN_MAX_CPU_ISA``, by which users disable it for torch's products, names a lesser one.

Rejected: torch.utils.cpp_extension (needs ninja, a C++ compiler and a minute). Rejected: wheels with binaries, which
would have to guess the vector width.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import library

_FILES = """emulation blocks casts fp4 gemm gemm_float32 grouped skinny_gemm skinny_gemm_float32 skinny_gemm_fp4
    stats"""
SOURCES = [Path(__file__).with_name(f"{name}.c") for name in _FILES.split()]
# No -ffast-math: these options change no result. Compilers vectorise selects of float products without trapping math.
FLAGS = (
    "-std=gnu11 -O3 -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared"
)
MIN_ELEMENTS = 1 << 10
"""Number of elements. Smaller tensors alone do not cause a compilation."""
MIN_PRODUCT = 1 << 14
"""Number of elements of both operands. Packing smaller ones for the GEMM takes longer than torch's product."""
MAX_THREADS = 1024
"""Maximum number of threads. With many more, torch's thread pool and OpenMP end the process."""
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
_is_functorch, _is_functional = torch._C._functorch.is_functorch_wrapped_tensor, torch._is_functional_tensor
_tracing = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY)
_ELEMENTWISE = (
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
    *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32),
)
"""The arguments of casts and decodings."""


def usable(x: torch.Tensor) -> bool:
    """Whether these kernels take x: C compiles, x ``is_plain`` and not empty, and large unless they are loaded already.

    The bits are the same with and without them.
    """
    least = 1 if _load.cache_info().currsize else MIN_ELEMENTS
    return x.numel() >= least and readable(x) and x.is_contiguous() and reason() is None


def is_plain(x: torch.Tensor) -> bool:
    """Whether C can read x from end to end: ``readable``, and contiguous."""
    return readable(x) and x.is_contiguous()


def reason() -> str | None:
    """Why there are no compiled kernels on this machine; None if there are. Compiles them on the first call."""
    return _load()[1]


def cast(
    x: torch.Tensor, scale: torch.Tensor | None, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Codes of x times its block's scale, as from ``numerics.cast.cast``.

    Args:
        x: contiguous; float32, bfloat16 or float16; [rows, cols], or any shape under one scale.
        scale: float32, one for each block, row-major; None means 1.
        block: (rows, cols) that share a scale; 0: the whole extent.
        dtype: float8_e4m3fn or float8_e5m2.
    """
    codes = torch.empty(x.shape, dtype=dtype, device="cpu")
    _elementwise(function_of("cast", dtype, x.dtype), x, codes, scale, block)
    return codes


def decode(
    codes: torch.Tensor, scale: torch.Tensor | None, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Codes times their block's scale in float32, rounded once to dtype: bfloat16 or float32.

    Args as in ``cast``. A NaN code gives the canonical quiet NaN of dtype, Inf codes give Inf.
    """
    values = torch.empty(codes.shape, dtype=dtype, device="cpu")
    _elementwise(function_of("decode", codes.dtype, dtype), codes, values, scale, block)
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


# ----------------------------------------------------------------------------------------------------------- products

AVX512, AMX, FLOAT32 = 1, 2, 4
"""gemm.c's numbers of its inner loops."""
# fmt: off
_BELOW_AMX = frozenset({
    "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2",
    "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512",
})
# fmt: on
FORMATS = {torch.bfloat16: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2, torch.float4_e2m1fn_x2: 3}
"""C's numbers of operands' dtypes."""
_SQUARE = 32
"""Elements along k that gemm.c packs together, with one scale."""


class Operand(NamedTuple):
    """One side of a product, [rows, k].

    Attributes:
        values: float8_e4m3fn, float8_e5m2 or bfloat16, of any strides.
        scale: float32 or float8_e8m0fnu, one for each block, of any strides; None: 1.
        block: (rows, k) that share a scale; 0: the whole extent.
        pow2: every scale is a power of two.
        finite: known to have no NaN and no Inf, so C does not check; False: not known.
        fp4_scale: of values float4_e2m1fn_x2 [rows, k / 2], contiguous: float8_e4m3fn [row blocks, k / 16], contiguous.
            The inner loop FLOAT32 does not take these.
        fp4_rows: rows that share one of these scales.
    """

    values: torch.Tensor
    scale: torch.Tensor | None = None
    block: tuple[int, int] = (0, 0)
    pow2: bool = False
    finite: bool = False
    fp4_scale: torch.Tensor | None = None
    fp4_rows: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, k)"""
        rows, k = self.values.shape
        return (rows, k) if self.fp4_scale is None else (rows, 2 * k)


class Side(ctypes.Structure):
    """gemm.h's."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("row_step", ctypes.c_int64),
        ("k_step", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("e8m0", ctypes.c_int32),
        ("finite", ctypes.c_int32),
        ("scale", ctypes.c_void_p),
        ("block_rows", ctypes.c_int64),
        ("block_k", ctypes.c_int64),
        ("scale_row_step", ctypes.c_int64),
        ("scale_k_step", ctypes.c_int64),
        ("block_scale", ctypes.c_void_p),
        ("block_scale_rows", ctypes.c_int64),
    )


class Out(ctypes.Structure):
    """gemm.h's."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("bfloat16", ctypes.c_int32),
        ("add", ctypes.c_int32),
        ("bias", ctypes.c_void_p),
    )


@cache
def inner_loops() -> tuple[int, ...]:
    """This processor's inner loops, fastest first; empty without the instructions or a C compiler."""
    if reason() is not None:
        return ()
    found = load_kernels().has_gemm()
    return tuple(loop for loop in (AMX, AVX512, FLOAT32) if found & loop)


@cache
def inner_loop() -> int | None:
    """The inner loop of products; None: there is none. Like oneDNN it reads the environment once."""
    found = inner_loops()
    names = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    limit = next((os.environ[name] for name in names if name in os.environ), "").upper()
    if limit in _BELOW_AMX:
        found = tuple(loop for loop in found if loop != AMX)
    return found[0] if found else None


def fits(a: Operand, b: Operand, *, any_size: bool = False) -> bool:
    """Whether ``multiply`` takes these operands, given an ``inner_loop``: plain CPU tensors, large enough to pay for
    packing (or ``any_size``), with power-of-two scales along k, each for a multiple of 32."""
    if not any_size and math.prod(a.shape) + math.prod(b.shape) < MIN_PRODUCT:
        return False
    for of in (a, b):
        if of.values.dtype not in FORMATS or not (readable(of.values) and of.values.numel()):
            return False
        if of.scale is not None and not (
            readable(of.scale) and (of.block[1] == 0 or (of.pow2 and of.block[1] % _SQUARE == 0))
        ):
            return False
    return True


def readable(x: torch.Tensor) -> bool:
    """Whether C can read x at its address: a plain CPU tensor with its numbers in memory.

    torch.func's wrappers have no memory, and a graph that make_fx traces would miss C's writes.
    """
    return (
        x.is_cpu
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and not (x.is_neg() or x._is_zerotensor())
        and not (_is_functorch(x) or _is_functional(x))
        and _tracing() is None
    )


def multiply(
    a: Operand,
    b: Operand,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    into: torch.Tensor | None = None,
    loop: int | None = None,
) -> torch.Tensor | None:
    """a [M, K] @ b [N, K]^T, scaled: sums * (scale_a * scale_b) + bias in float32, rounded once to dtype.

    Args:
        dtype: float32 or bfloat16.
        bias: float32 [N], contiguous.
        into: float32 [M, N], contiguous: the product is added to it (dtype float32, no bias) and it is returned.
        loop: one of ``inner_loops``; None: ``inner_loop``.

    Returns:
        [M, N], or None if scales are so small or large that numbers or sums could leave bfloat16's normal range. An
        element depends only on its row and column: the order of its sum is the same for any M, N and number of
        threads. NaN and Inf spread as in IEEE arithmetic; subnormal numbers of bfloat16 operands may count as zero.
    """
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=dtype, device="cpu") if into is None else into
    assert b.shape[1] == k and out.shape == (m, n), (a.shape, b.shape, out.shape)
    if into is not None and not (m and n and k):
        return into
    if not (m and n and k):
        return out.zero_() if bias is None else out.copy_(bias.expand(m, n))
    to = out_of(out, bias, add=into is not None)
    (side_a, values_a), (side_b, values_b) = side_of(a), side_of(b)
    done = load_kernels().gemm(
        ctypes.byref(side_a),
        ctypes.byref(side_b),
        ctypes.byref(to),
        ctypes.c_int64(m),
        ctypes.c_int64(n),
        ctypes.c_int64(k),
        loop or inner_loop(),
        thread_count(max(values_a.numel(), values_b.numel(), out.numel())),
    )
    if done < 0:
        raise MemoryError(f"no memory to pack matrices of {m} x {k} and {n} x {k}")
    return None if done else out


def side_of(of: Operand) -> tuple[Side, torch.Tensor]:
    """C's description of an operand, and the tensor that owns the memory: a copy if neither rows nor columns are dense.

    AssertionError unless there is a scale for each block.
    """
    values, scale, (block_rows, block_k) = of.values, of.scale, of.block
    if 1 not in values.stride():
        values = values.clone(memory_format=torch.contiguous_format)
    rows, k = of.shape
    row_step, k_step = values.stride()
    fp4_scale = None
    if of.fp4_scale is not None:
        address(values, torch.float4_e2m1fn_x2, rows * k // 2)
        fp4_scale = address(of.fp4_scale, torch.float8_e4m3fn, -(-rows // of.fp4_rows) * k // 16)
        row_step, k_step = k, 1
    steps: tuple[int, ...] = (0, 0)  # strides of the scales along rows and along k
    if scale is not None:
        wanted = (-(-rows // block_rows) if block_rows else 1, -(-k // block_k) if block_k else 1)
        fits = scale.shape == wanted or (wanted == (1, 1) and scale.numel() == 1)
        if not fits or scale.dtype not in (torch.float32, torch.float8_e8m0fnu):
            raise AssertionError(
                f"scales {list(wanted)} of float32 or E8M0 are needed, got {describe(scale)}"
            )
        steps = scale.stride() if scale.ndim == 2 else steps
    return Side(
        values.data_ptr(),
        row_step,
        1 if k == 1 else k_step,  # a dimension of one element may have any stride
        FORMATS[values.dtype],
        int(scale is not None and scale.dtype != torch.float32),
        int(of.finite),
        None if scale is None else scale.data_ptr(),
        block_rows,
        block_k,
        *steps,
        fp4_scale,
        of.fp4_rows,
    ), values


def out_of(out: torch.Tensor, bias: torch.Tensor | None, *, add: bool) -> Out:
    """C's description of the result, float32 or bfloat16 [m, n]; add: add to it, in float32."""
    assert not add or out.dtype == torch.float32, "C adds to float32 alone"
    return Out(
        address(out, out.dtype, out.numel()),
        int(out.dtype == torch.bfloat16),
        int(add),
        None if bias is None else address(bias, torch.float32, out.shape[1]),
    )


def has_matmul() -> bool:
    """Whether this processor has gemm.c's BF16 instructions, and the kernels could be compiled."""
    return inner_loop() is not None


# -------------------------------------------------------------------------------------------------------- the library


def address(x: torch.Tensor, dtype: torch.dtype, elements: int) -> ctypes.c_void_p:
    """x's address for C, which does not check it. AssertionError unless x has so many elements of dtype, dense, on the
    CPU."""
    if x.dtype != dtype or x.numel() != elements or not x.is_cpu or not x.is_contiguous():
        raise AssertionError(
            f"{elements} contiguous elements of {dtype} on the CPU are needed, got {describe(x)}"
        )
    return ctypes.c_void_p(x.data_ptr())


def describe(x: torch.Tensor) -> str:
    """Describes a tensor in a message."""
    return f"{list(x.shape)}, strides {list(x.stride())}, {x.dtype} on {x.device}"


def thread_count(elements: int) -> int:
    """Number of threads for this many elements."""
    return max(1, min(torch.get_num_threads(), MAX_THREADS, elements // _THREAD_ELEMENTS))


@cache
def load_kernels() -> ctypes.CDLL:
    """The kernels; only where ``reason()`` is None."""
    loaded, why = _load()
    assert loaded is not None, why
    return loaded


@cache
def function_of(kind: str, *dtypes: torch.dtype) -> Callable[..., Any]:
    """The function of a kind for these dtypes; cached."""
    function = getattr(load_kernels(), "_".join([kind, *(NAMES[dtype] for dtype in dtypes)]))
    function.argtypes = _ELEMENTWISE
    function.restype = None
    return function


@cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """(the library, None), or (None, why there is none)."""
    return library.load(SOURCES, FLAGS)
