"""Every variant of the Triton kernels that a GPU run launches, compiled before it, on all cores at once.

A variant is a kernel for given dtypes, flags, and arguments that are 1, None or multiples of 16. They are found by
running what launches them on tensors without memory. Each is compiled in a process of its own for the GPU's architecture,
which takes no GPU: a compiler that dies is one variant's failure. What is compiled lies in Triton's cache for all later
processes.

    python -m benchmarks.gpu_variants 9.0      # for an H100 or H200, on any machine
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_checks import CODES, GEMMS, PRECOMPILED
from benchmarks.gpu_common import RECIPES, Machine, NotRun

META = torch.device("meta")
BF16 = torch.bfloat16
COMPILE_SECONDS = 120.0


@dataclass(frozen=True)
class Variant:
    """A kernel and the arguments of its first launch."""

    kernel: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name and its flags."""
        flags = [
            key if value is True else f"{key}={value}"
            for key, value in self.keywords.items()
            if key.isupper() and value is not False
        ]
        return f"{self.kernel.__name__}[{' '.join(flags)}]"


def checks() -> dict[str, Callable[[Machine], str]]:
    """The one check."""
    return {"variants": variants}


def variants(machine: Machine) -> str:
    """Compile all; those that fail are results by name."""
    major, minor = (9, 0) if machine.dry else torch.cuda.get_device_capability(machine.device)
    found = launched(10 * major + minor)
    if machine.dry:
        raise NotRun(f"dry run: {len(found)} kernel variants are found, and none is compiled")
    return compiled_all(found, 10 * major + minor, machine.tell, launchers=True)


def compiled_all(
    found: Sequence[Variant], architecture: int, tell: Callable[..., None], *, launchers: bool
) -> str:
    """Compile variants for an architecture (90 for an H100); AssertionError if one fails, and each failure is told."""
    cores, start = len(os.sched_getaffinity(0)), time.monotonic()
    slowest, failed = 0.0, []
    for variant, seconds, problem in compiling(found, architecture, cores, launchers):
        slowest = max(slowest, seconds)
        if problem:
            name = f"variant {found.index(variant)} {variant.name}"
            failed.append(name)
            tell(result={"check": name, "verdict": "FAIL", "detail": problem, "seconds": seconds})
    took = f"{time.monotonic() - start:.0f} s on {cores} cores, the slowest in {slowest:.1f} s"
    assert not failed, f"{len(failed)} of {len(found)} variants do not compile; the first: {failed[0]}"
    return f"{len(found)} variants of {len({v.kernel.__name__ for v in found})} kernels in {took}"


def compiling(
    found: Sequence[Variant], architecture: int, cores: int, launchers: bool
) -> Iterator[tuple[Variant, float, str]]:
    """(variant, seconds, what went wrong, '' if nothing did), as they are done; ``cores`` at a time."""
    fork = multiprocessing.get_context("fork")
    waiting = deque(found)
    running: dict[Any, tuple[Any, Variant, Connection, float]] = {}
    while waiting or running:
        while waiting and len(running) < cores:
            variant = waiting.popleft()
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_compile, args=(variant, architecture, launchers, theirs))
            process.start()
            theirs.close()
            running[process.sentinel] = process, variant, ours, time.monotonic()
        ready = set(wait(list(running), timeout=1.0))
        for sentinel, (process, variant, ours, start) in list(running.items()):
            seconds = time.monotonic() - start
            if sentinel in ready:
                process.join()
                try:
                    problem = ours.recv()
                except EOFError:
                    problem = f"its compiler ended with {process.exitcode}"
            elif seconds > COMPILE_SECONDS:
                process.kill()
                problem = f"no end within {COMPILE_SECONDS:g} s"
            else:
                continue
            ours.close()
            del running[sentinel]
            yield variant, seconds, problem


def _compile(variant: Variant, architecture: int, launchers: bool, answer: Connection) -> None:
    """In a process of its own: into Triton's cache."""
    from triton.runtime import driver

    from benchmarks.support.compiled import TargetDriver

    driver.set_active(TargetDriver(architecture))
    problem = ""
    try:
        built = variant.kernel.run(*variant.arguments, grid=(1,), warmup=True, **variant.keywords)
        if launchers:
            _build_launcher(built)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    answer.send(problem[:2000])


def _build_launcher(built: Any) -> None:
    """Triton before 3.7 compiles C to launch each signature too, when it is first launched; libcuda has to be here."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(built.src, built.metadata)


# ------------------------------------------------------------------------------------------------- what is launched


def launched(architecture: int) -> list[Variant]:
    """The variants of all that the checks and the benchmark launch on an architecture, each once."""
    import triton

    from megatron_fp8.backends.native import backend as native
    from megatron_fp8.kernels import block_matmul
    from megatron_fp8.study.support_matrix import torch_refusal

    found: dict[Any, Variant] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        constant = {p.name for p in self.params if p.is_constexpr}
        anywhere = {p.name for p in self.params if p.do_not_specialize_on_alignment}
        key = [
            (n, str(v) if n in constant else _specialised(v, n in anywhere)) for n, v in sorted(named.items())
        ]
        found.setdefault((self.__name__, *key), Variant(self, args, kwargs))

    tma, refusal = architecture in block_matmul.TMA_ARCHITECTURES, torch_refusal(divmod(architecture, 10))
    with (
        mock.patch.object(triton.JITFunction, "run", run),
        mock.patch.object(block_matmul, "has_tma", lambda: tma),
        mock.patch.object(native, "refusals", lambda *_: refusal),
    ):
        for work in (_digests, _quantized, _computed, _four_bits, _updates, _products):
            work()
    return list(found.values())


def _specialised(value: Any, anywhere: bool) -> Any:
    """What of an argument a variant is made for; ``anywhere``: not for where it lies."""
    if isinstance(value, torch.Tensor):
        return value.dtype, anywhere or value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return "int", value == 1, value % 16 == 0, value < 1 << 31
    return type(value)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Without memory."""
    return torch.empty(shape, dtype=dtype, device=META)


def _digests() -> None:
    from benchmarks import gpu_digests

    def matrix(seed: int, rows: int, cols: int, dtype: torch.dtype, special: bool) -> torch.Tensor:
        return empty(rows, cols, dtype=dtype)

    functions = gpu_digests.kernel_functions()
    with mock.patch.object(gpu_digests, "matrix", matrix):  # its numbers take a core ten seconds
        for case in gpu_digests.cases():
            case.outputs(functions, META)


def _quantized() -> None:
    """Matrices as they are: every recipe, role and direction, even and odd sizes, scales on and off 16 bytes."""
    from megatron_fp8.backends.native import backend as native

    sizes = {*CODES, *((m, k) for m, _, k in GEMMS), *((n, k) for _, n, k in GEMMS), (8192, 4096)}
    sizes |= {(m, n) for m, n, _ in GEMMS}
    scales, straight = empty(2), {"running": _running(), "for_product": True}
    for recipe in RECIPES.values():
        for role in ("input", "weight", "grad_output"):
            rule = recipe.rule(role)
            for rows, cols in sizes:
                x = empty(rows, cols, dtype=BF16)
                native.quantize(x, rule, "both")
                native.quantize(x, rule, "both", **straight)
                for direction in ("both", "rowwise", "columnwise") if rows % 16 == cols % 16 == 0 else ():
                    native.quantize(x, rule, direction)
                    native.quantize(x, rule, direction, **straight)
                    for scale in scales if rule.delayed else []:
                        native.quantize(x, rule, direction, scale=scale)


def _computed() -> None:
    """Norm, SwiGLU and its gradient, computed by who quantizes them, and written."""
    from megatron_fp8.backends.native import backend as native
    from megatron_fp8.kernels.fused_quantize import (
        RmsNorm,
        Swiglu,
        SwigluGradient,
        row_rstd,
        swiglu_weight_grad,
    )
    from megatron_fp8.kernels.lazy_tensor import LazyTensor
    from megatron_fp8.kernels.quantize import write_matrix

    scales, straight = empty(2), {"running": _running(), "for_product": True}
    for rows, cols in ((8192, 4096), (70, 200), (70, 202), (4096, 256)):
        x, wide = empty(rows, cols, dtype=BF16), empty(rows, 2 * cols, dtype=BF16)
        makers: dict[str, Callable[[], Any]] = {
            "input": partial(RmsNorm, x, row_rstd(x, 1e-5), empty(cols, dtype=BF16)),
            "weight": partial(Swiglu, wide),
            "grad_output": partial(SwigluGradient, empty(rows, cols // 2, dtype=BF16), x),
        }
        swiglu_weight_grad(x, wide)
        for which, make in makers.items():
            write_matrix(make())
            for recipe in RECIPES.values():
                rule = recipe.rule("grad_output" if which == "grad_output" else "input")
                for direction in ("both", "rowwise") if rows % 16 == 0 else ("both",):
                    for scale in (None, *scales) if rule.delayed else (None,):
                        source = make()
                        matrix = LazyTensor(source, (source.rows, source.cols))
                        native.quantize(matrix, rule, direction, scale=scale)
                    native.quantize(matrix, rule, direction, **straight)


def _four_bits() -> None:
    """NVFP4's casts, of even and odd sizes, which GPUs without a product for them do not need."""
    from megatron_fp8.kernels import fp4_quantize
    from megatron_fp8.numerics.cast import RandomKey

    for rows, cols in ((8192, 4096), (70, 200), (129, 257)):
        x, draws = empty(rows, cols, dtype=BF16), fp4_quantize.Draws(RandomKey(0), 0, cols)
        layouts: tuple[dict[str, Any], ...] = ({}, {"tiled": True, "pad_to": 32, "room": 16})
        ways: tuple[dict[str, Any], ...] = (
            {"square": True},
            {"transformed": True},
            {"transformed": True, "draws": draws},
        )
        for layout, how in product(layouts, ways):
            for direction in ("both", "rowwise", "columnwise"):
                fp4_quantize.cast(x, direction, empty(2), **how, **layout)
        fp4_quantize.find_amaxes(x, transformed=True)
    fp4_quantize.product_factor(empty(), empty())


def _running() -> Any:
    """A slot's numbers."""
    from megatron_fp8.backends.base import RunningAmax

    return RunningAmax(empty(), empty(dtype=torch.int32), empty())


def _updates() -> None:
    """The delayed update, pieces of masters, and codes turned."""
    from megatron_fp8.kernels.delayed_update import update_delayed
    from megatron_fp8.kernels.gemm_layouts import transpose
    from megatron_fp8.kernels.param_cast import piece_amax, piece_cast
    from megatron_fp8.numerics.formats import E4M3
    from megatron_fp8.state.amax_history import AmaxRingBuffer

    for rows, cols in ((4096, 4096), (300, 257), (70, 200)):
        transpose(empty(rows, cols, dtype=torch.uint8))
    for slots in (1, 2, 21, 450, 7, 16):
        index, head = (empty(slots, dtype=torch.int64) for _ in range(2))
        for length in (1, 4, 16):
            rings = AmaxRingBuffer(slots, length, META)
            update_delayed(
                empty(slots), empty(slots), index, head, rings.rows, rings.maxima, empty(slots), length=length
            )
    for rows, cols in ((1000, 520), (4096, 4096), (130, 140)):
        whole, shape = rows * cols, (rows, cols)
        for scale in (empty(), empty(-(-rows // 128), -(-cols // 128))):
            for offset, count in ((0, whole), (0, 1), (1, whole // 7 - 1), (whole // 7, whole - whole // 7)):
                master = empty(whole)[offset : offset + count]
                codes = empty(whole, dtype=torch.uint8)[offset : offset + count]
                piece_amax(master, offset, shape, BF16, scale, empty())
                piece_cast(master, offset, shape, BF16, scale, codes, E4M3)


def _products() -> None:
    """The block-scaled product, for a torch that lacks one, and scales for the MX product in its place."""
    from megatron_fp8.kernels.block_matmul import block_matmul
    from megatron_fp8.kernels.gemm_layouts import tile_scales

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for m, n, k in PRECOMPILED:  # what is tried first, and an even one
        blocks = -(-k // 128)
        rows = empty(blocks, m).t()
        tile_scales(rows, m, k, width=128)
        for square in (empty(-(-m // 128), 4 * -(-blocks // 4))[:, :blocks], empty(blocks, -(-m // 128)).t()):
            tile_scales(square, m, k, height=128, width=128)
        exponents = empty(m, -(-k // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        for scale in (exponents, empty(-(-k // 32), m, dtype=torch.uint8).view(torch.float8_e8m0fnu).t()):
            tile_scales(scale, m, k)
        sides = (
            (empty(n, k, dtype=e4m3), empty(blocks, n).t(), 1),
            (
                empty(n, k, dtype=e4m3),
                empty(-(-n // 128), 4 * -(-blocks // 4))[:, :blocks],
                128,
            ),
        )
        for codes in (empty(m, k, dtype=e4m3), empty(m, k, dtype=e5m2)):
            for b, scale, height in sides:
                block_matmul(
                    codes, rows, b, scale, b_height=height, out_dtype=torch.float32, into=empty(m, n)
                )
                for out in (torch.float32, BF16, torch.float16):
                    for bias in (None, empty(n, dtype=out)):
                        block_matmul(codes, rows, b, scale, b_height=height, out_dtype=out, bias=bias)
    _grouped_products()


def _grouped_products() -> None:
    """Experts' products: forward and dgrad, and wgrad added to main_grad, of even and of odd sizes."""
    from megatron_fp8.kernels.block_matmul import Product, grouped_block_matmul

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for m, n, k in ((36, 144, 640), (36, 145, 640)):
        rows, b_rows, square = (
            empty(-(-k // 128), -(-size // height)).t() for size, height in ((m, 1), (n, 1), (n, 128))
        )
        for a in (empty(m, k, dtype=e4m3), empty(m, k, dtype=e5m2)):
            b = empty(n, k, dtype=e4m3)
            for out in (torch.float32, BF16, torch.float16):
                product = Product(a, rows, b, square, empty(m, n, dtype=out))
                grouped_block_matmul(a, [product], a_height=1, b_height=128)
            for add in (False, True):
                product = Product(a, rows, b, b_rows, empty(m, n))
                grouped_block_matmul(a, [product], a_height=1, b_height=1, add=add)


def main() -> int:
    """Compile all for the capability given; 1 if a variant fails."""
    major, minor = map(int, sys.argv[1].split("."))
    architecture = 10 * major + minor
    found = launched(architecture)
    print(Counter(v.kernel.__name__ for v in found), flush=True)

    def tell(result: dict[str, Any]) -> None:
        print(result["check"], result["detail"], flush=True)

    try:
        print(compiled_all(found, architecture, tell, launchers=False))
    except AssertionError as failure:
        print(failure)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
