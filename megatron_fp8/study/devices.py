"""Devices: generations (the support matrix's columns), documented FP8 products of GPUs, trials on this machine.

The documented products, by torch and Transformer Engine, are not used for the machine itself: the native
backend tries each product, and Transformer Engine is queried. Each rule names its source. They apply to CUDA
12.9 and newer, and to the releases in ``SOURCES``. A trial compares a recipe on a backend with the exact
product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch

from ..backends import BACKENDS, emulated
from ..backends import transformer_engine as engine
from ..backends.native.layout import Mode, Refusal, Request
from ..kernels.cpu import emulation
from ..recipe import RECIPES, CustomRecipe, Float8BlockScaling, MXFP8BlockScaling, Recipe
from ..state.collectives import own_device


@dataclass(frozen=True)
class Generation:
    """One column of the matrix.

    Attributes:
        key: its name in JSON: sm90, mi300x, cpu-amx.
        column: its name in the table, at most four characters.
        name: in words.
        capability: an NVIDIA GPU's compute capability.
        architecture: an AMD GPU's architecture.
        amx, avx512_bf16: instruction sets of a CPU.
    """

    key: str
    column: str
    name: str
    capability: tuple[int, int] | None = None
    architecture: str | None = None
    amx: bool = False
    avx512_bf16: bool = False

    @property
    def is_cpu(self) -> bool:
        """Whether it is a CPU."""
        return self.capability is None and self.architecture is None


GENERATIONS = (
    Generation("sm80", "8.0", "A100", (8, 0)),
    Generation("sm86", "8.6", "RTX 30, A10", (8, 6)),
    Generation("sm89", "8.9", "RTX 40, L4, L40S", (8, 9)),
    Generation("sm90", "9.0", "H100, H200", (9, 0)),
    Generation("sm100", "10.0", "B200, GB200", (10, 0)),
    Generation("sm103", "10.3", "B300, GB300", (10, 3)),
    Generation("sm120", "12.0", "RTX 50, RTX PRO Blackwell", (12, 0)),
    Generation("sm121", "12.1", "GB10", (12, 1)),
    Generation("mi300x", "300X", "MI300X", architecture="gfx942"),
    Generation("mi355x", "355X", "MI355X", architecture="gfx950"),
    Generation("cpu", "CPU", "CPU without AVX512-BF16 and AMX"),
    Generation("cpu-avx512-bf16", "bf16", "CPU with AVX512-BF16", avx512_bf16=True),
    Generation("cpu-amx", "amx", "CPU with AMX", amx=True, avx512_bf16=True),
)
"""Columns of the matrix, in their order."""


def here() -> Generation | None:
    """The column of the device that this process computes on; None for a GPU without a column."""
    if not torch.cuda.is_available():
        amx, short = torch.cpu._is_amx_tile_supported(), emulation.AVX512 in emulation.inner_loops()
        return next(
            g for g in reversed(GENERATIONS) if g.is_cpu and g.amx <= amx and g.avx512_bf16 <= (short or amx)
        )
    if vars(torch.version).get("hip"):
        name = torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName.partition(":")[0]
        return next((g for g in GENERATIONS if g.architecture == name), None)
    capability = torch.cuda.get_device_capability()
    return next((g for g in GENERATIONS if g.capability == capability), None)


SOURCES = {
    "torch": "torch 2.13, ScaledBlas.cpp; cuBLAS, narrow precision data types",
    "blocks": "torch 2.13, ScaledBlas.cpp; this package's kernel compiled for it by Triton 3.9, not run",
    "te": "Transformer Engine 2.20, pytorch/quantization.py",
}
"""Name in this module -> source of a rule."""


def torch_refusal(capability: tuple[int, int]) -> Refusal:
    """A function: request -> why torch has no such product on a GPU of this compute capability; None if it
    has.

    Does not cover products of this package's own kernel.
    """

    def refusal(request: Request) -> str | None:
        if request.triton:
            return None
        if request.mode in (Mode.BLOCK, Mode.BLOCK_1D):
            if capability[0] != 9:
                return "torch has 128-wide blocks on compute capability 9.x only"
            if request.by == "torch" and request.a != request.b:
                return "its newer product takes E4M3 by E4M3 only"
        if request.mode is Mode.MX and capability < (10, 0):
            return "32-wide blocks (MX) begin with compute capability 10.0"
        if request.mode is Mode.ROW and request.out == torch.float32:
            return "scales per row have no float32 result in older versions (pytorch#156771)"
        return None

    return refusal


def te_refusal(generation: Generation, recipe: Recipe) -> str | None:
    """Why Transformer Engine does not run a recipe (one that maps to its own) on an NVIDIA GPU; None if it does."""
    capability = generation.capability
    assert capability is not None, "a GPU of NVIDIA's"
    if capability < (8, 9):
        return "it asks for compute capability 8.9 or newer"
    if isinstance(recipe, MXFP8BlockScaling):
        if capability < (10, 0):
            return "it asks for compute capability 10.0 or newer for mxfp8"
        return "it does not have mxfp8 on compute capability 12.x yet" if capability >= (12, 0) else None
    if isinstance(recipe, Float8BlockScaling) and capability < (9, 0):
        return "it asks for compute capability 9.0 or newer and CUDA 12.9 for blockwise"
    return None


_GEMM_TOLERANCE, _LINEAR_TOLERANCE = 1e-3, 0.1


@dataclass(frozen=True)
class Trial:
    """Result of a recipe on a backend here.

    Attributes:
        recipe: its name; None: the backend cannot run here with any recipe.
        result: 'good', 'wrong', or 'refused' by the backend before running.
        error: native and emulated: largest error over the largest value of the exact product of the same
            codes. Transformer Engine: root mean square error, relative to the unquantized product.
        reason: why it was refused, or what is wrong besides the error.
        cure: remedy for a refusal.
    """

    backend: str
    recipe: str | None
    result: Literal["good", "wrong", "refused"]
    error: float | None = None
    reason: str | None = None
    cure: str | None = None


def trials() -> Iterator[Trial]:
    """Every recipe on every backend. A backend that cannot run here yields one trial for itself and one per recipe."""
    device = own_device()
    for backend in BACKENDS.values():
        yield from _of_backend(backend, device)
    yield from _of_transformer_engine(device)


def _of_backend(backend: ModuleType, device: torch.device) -> Iterator[Trial]:
    if (reason := backend.supports(device)) is not None:
        yield Trial(backend.name, None, "refused", reason=reason)
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(128, 256, generator=generator, dtype=torch.float32, device="cpu").to(device)
        for _ in range(2)
    )
    for name, made in RECIPES.items():
        if name == "custom":
            continue
        scaling = made()
        refused = reason or backend.supports(device, scaling)
        yield (
            Trial(backend.name, name, "refused", reason=refused)
            if refused is not None
            else _gemm(backend, name, scaling, x, w)
        )


def _gemm(backend: ModuleType, name: str, scaling: Recipe, x: torch.Tensor, w: torch.Tensor) -> Trial:
    rules = [scaling.rule(role) for role in ("input", "weight")]
    a, b = (
        backend.quantize(t, rule, "rowwise").tensor.rowwise for t, rule in zip((x, w), rules, strict=True)
    )
    found = backend.gemm(a, b, out_dtype=torch.float32)
    exact = emulated.gemm(a, b, out_dtype=torch.float64, exact=True)
    error = ((found.double() - exact).abs().max() / exact.abs().max()).item()
    return Trial(backend.name, name, "good" if error < _GEMM_TOLERANCE else "wrong", error)


def _of_transformer_engine(device: torch.device) -> Iterator[Trial]:
    cure = engine.INSTALL if engine.missing() is not None else None
    if (reason := engine.supports(device)) is not None:
        yield Trial(engine.name, None, "refused", reason=reason, cure=cure)
    for name, made in RECIPES.items():
        scaling = made() if name != "custom" else CustomRecipe(lambda role: None)
        refused = reason or engine.supports(device, scaling)
        if refused is not None:
            yield Trial(engine.name, name, "refused", reason=refused, cure=cure)
            continue
        error, differs = engine.try_linear(scaling, device)
        good = error < _LINEAR_TOLERANCE and not differs
        yield Trial(engine.name, name, "good" if good else "wrong", error, "; ".join(differs) or None)
