"""The support matrix: recipe x backend x device, from the backends' own rules.

The backends' own checks are called with another device's properties: ``capability_reason``, ``architecture_reason``,
``missing_product`` and ``kernel_gemms`` of the native backend, ``unsupported_part`` and ``device_reason`` of Transformer
Engine's. Only what a library would answer there is written down, for CUDA 12.9 and newer and the releases in
``SOURCES``. Trials replace the cells of this machine.

`estimate` takes the FP8 peak from a data sheet, even if this package does not run the recipe there. So it
looks up the same cells that `doctor` prints.

Rejected: a table written by hand. The one in docs/backends.md had to be corrected whenever the rules changed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..backends import BACKENDS, LAYER_BACKENDS, emulated, transformer_engine
from ..backends.native import backend as native
from ..backends.native.layout import Mode, Refusal, Request
from ..backends.native.probe import (
    NOT_A_GPU,
    architecture_reason,
    capability_reason,
    kernel_gemms,
    missing_product,
    mx_gemms,
)
from ..estimate.device import Device
from ..estimate.model import Model, recipe_of
from ..fp8_utils import quantizes, recipe_name_of
from ..kernels.cpu import emulation
from ..recipe import RECIPES, Float8BlockScaling, MXFP8BlockScaling, Recipe


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


def this_device() -> Generation | None:
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
        if any(request.turned) and capability[0] != 10:
            return "transposed codes are multiplied on compute capability 10.x only"
        if request.mode is Mode.MX and capability < (10, 0):
            return "32-wide blocks (MX) begin with compute capability 10.0"
        if request.mode is Mode.FP4 and capability < (10, 0):
            return "products of 4-bit codes begin with compute capability 10.0"
        if request.mode is Mode.ROW and request.out == torch.float32 and capability[0] != 9:
            return "CUTLASS multiplies scales per row, without a float32 result"
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


@dataclass(frozen=True)
class Trial:
    """Result of a recipe on a backend here.

    Attributes:
        recipe: its name; None: the backend cannot run here with any recipe.
        result: 'good', 'wrong', or 'refused' by the backend before running.
        error: native and emulated: largest error over the largest value of the exact product of the same
            codes. Transformer Engine: root mean square error, relative to the unquantized product.
        reason: why it was refused, or what is wrong besides the error.
        remedy: remedy for a refusal.
    """

    backend: str
    recipe: str | None
    result: Literal["good", "wrong", "refused"]
    error: float | None = None
    reason: str | None = None
    remedy: str | None = None


Known = Literal["tried here", "documentation", "not known"]

RECIPE_NAMES = tuple(name for name in RECIPES if name != "custom")
"""The matrix's recipes; support of a custom recipe depends on its rules."""

_ANY_DEVICE = "fp8_backend=auto: the emulated backend runs everywhere"
OURS = "megatron_fp8's own rule"
"""Source of cells that depend on no library."""


@dataclass(frozen=True)
class Cell:
    """Whether a backend runs a recipe on a generation.

    Attributes:
        supported: by the code's rules; None: unknown.
        known: the evidence. 'not known' with a verdict: the code would run it, but nobody has tried.
        reason, remedy: for an unsupported cell: why, and what to do instead.
        note: for a supported cell: a substitute product, if used.
        source: documentation that the cell is based on.
    """

    backend: str
    recipe: str
    device: str
    supported: bool | None
    known: Known
    reason: str | None = None
    remedy: str | None = None
    note: str | None = None
    source: str | None = None

    @property
    def mark(self) -> str:
        """At most four characters: yes or no, then * tried here, ? not known, nothing: from documentation."""
        if self.supported is None:
            return "?"
        end = {"tried here": "*", "documentation": "", "not known": "?"}[self.known]
        return ("yes" if self.supported else "no") + end


def matrix(here: Generation | None, trials: Iterable[Trial]) -> list[Cell]:
    """All cells by backend and recipe; this machine's column has the results of trials."""
    tried = {(trial.backend, trial.recipe): trial for trial in trials}
    cells = []
    for backend in (*BACKENDS, *LAYER_BACKENDS):
        for recipe in RECIPE_NAMES:
            for generation in GENERATIONS:
                cell = documented_cell(backend, recipe, generation)
                trial = tried.get((backend, recipe)) if generation == here else None
                cells.append(cell if trial is None else _from_trial(cell, trial))
    return cells


def documented_cell(backend: str, recipe: str, generation: Generation, made: Recipe | None = None) -> Cell:
    """One cell, without a trial. ``made``: the recipe with a run's options; None: with defaults."""
    made = RECIPES[recipe]() if made is None else made
    cell = Cell(backend, recipe, generation.key, True, "documentation")
    if backend not in _RULES:
        return replace(
            cell, supported=None, known="not known", note=f"{backend} has no rules here: tried only"
        )
    return _RULES[backend](cell, made, generation)


def cpu_product(generation: Generation) -> str:
    """How a CPU multiplies: the rule of kernels/gemms.py."""
    if generation.avx512_bf16:
        return "gemm.c multiplies BF16 (with a C compiler)"
    return "products in float32, as exact"


def _emulated(cell: Cell, recipe: Recipe, generation: Generation) -> Cell:
    if generation.is_cpu:
        reason = emulated.supports(torch.device("cpu"), recipe)
        return _mark_refused(cell, reason, None, note=cpu_product(generation), source="docs/installation.md")
    cell = _mark_refused(
        cell, emulated.supports(torch.device("cuda"), recipe), None, source="docs/backends.md"
    )
    return replace(cell, known="not known", source=None) if generation.architecture else cell


def _native(cell: Cell, recipe: Recipe, generation: Generation) -> Cell:
    if generation.capability is None:
        architecture = generation.architecture
        why = NOT_A_GPU if architecture is None else architecture_reason(architecture)
        return _mark_refused(cell, why, _ANY_DEVICE, source=OURS)
    if reason := capability_reason(generation.name.partition(",")[0], generation.capability):
        return _mark_refused(cell, reason, _ANY_DEVICE, source=OURS)
    refusal = torch_refusal(generation.capability)
    reason = missing_product(recipe, refusal)
    if reason is not None:
        remedy = f"fp8_recipe=rowwise, tensorwise or blockwise; or {_ANY_DEVICE}"
        return _mark_refused(cell, reason.rpartition(": ")[2], remedy, source=SOURCES["torch"])
    if gemms := kernel_gemms(recipe, refusal):
        note = f"{', '.join(gemms)} by this package's Triton kernel: torch has no such product there"
        return replace(cell, note=note, source=SOURCES["blocks"])
    if gemms := mx_gemms(recipe, refusal):
        note = f"{', '.join(gemms)} by torch's MX product: each scale, a power of two, is that of four blocks of 32"
        return replace(cell, note=note, source=SOURCES["torch"])
    return replace(cell, source=SOURCES["torch"])


def _transformer_engine(cell: Cell, recipe: Recipe, generation: Generation) -> Cell:
    if reason := transformer_engine.unsupported_part(recipe):
        return _mark_refused(cell, reason, "fp8_backend=native or auto", source=OURS)
    if generation.is_cpu:
        reason = transformer_engine.device_reason(torch.device("cpu"))
        return _mark_refused(cell, reason, _ANY_DEVICE, source=OURS)
    if generation.architecture is not None:
        return replace(
            cell, supported=None, known="not known", note="AMD's own Transformer Engine was not looked at"
        )
    has_fp8 = generation.capability is not None and generation.capability >= (8, 9)
    remedy = "fp8_backend=native, or another recipe" if has_fp8 else _ANY_DEVICE
    return _mark_refused(cell, te_refusal(generation, recipe), remedy, source=SOURCES["te"])


_RULES = {
    emulated.name: _emulated,
    native.name: _native,
    transformer_engine.name: _transformer_engine,
}
"""How a backend's cells are filled without a trial."""


def _mark_refused(cell: Cell, reason: str | None, remedy: str | None, **facts: Any) -> Cell:
    """The cell, marked unsupported if there is a reason."""
    if reason is None:
        return replace(cell, **facts)
    return replace(cell, supported=False, reason=reason, remedy=remedy, source=facts.get("source"))


def _from_trial(cell: Cell, trial: Trial) -> Cell:
    if trial.result == "refused":
        remedy = cell.remedy or trial.remedy
        return replace(
            cell,
            supported=False,
            known="tried here",
            reason=trial.reason,
            remedy=remedy,
            note=None,
            source=None,
        )
    if trial.result == "wrong":
        why = f"it computes wrongly here: {trial.reason}"
        return replace(
            cell, supported=False, known="tried here", reason=why, remedy="please report this", source=None
        )
    return replace(cell, supported=True, known="tried here", reason=None, remedy=None, source=None)


@dataclass(frozen=True)
class DeviceSupport:
    """Support of a run's FP8 on a device.

    Attributes:
        native: False: a recipe of the run would not run natively; None: unknown.
        reason: why it is not True.
        notes: substitutes used for a product, if any.
    """

    native: bool | None
    reason: str | None = None
    notes: tuple[str, ...] = ()


def native_support(model: Model, device: Device) -> DeviceSupport | None:
    """The result; None if there is nothing to check: a BF16 run, or measured FP8 rates.

    Raises:
        ValueError: the device's file names a generation without a column in the matrix.
    """
    generation = _generation(device)
    if not quantizes(model) or device.measured:
        return None
    if model.fp8_backend == emulated.name:
        return DeviceSupport(False, "fp8_backend=emulated multiplies the values of codes in BF16 or float32")
    if generation is None:
        return DeviceSupport(
            None, "its file has no line `generation`, a column of doctor's matrix such as sm90"
        )
    request = model.fp8_backend
    backend = native.name if request in (None, "auto") else str(request)
    recipes, notes = recipe_of(model), []
    for name in dict.fromkeys([recipe_name_of(model), *_override_recipes(model.fp8_overrides)]):
        cell = documented_cell(backend, name, generation, recipes(name))
        if not cell.supported:
            place = f"{backend} {name} on {generation.name}"
            return DeviceSupport(cell.supported, f"{place}: {cell.reason or cell.note}")
        if cell.note:
            notes.append(f"{name} on {generation.name}: {cell.note}; the times assume the peak nevertheless")
    return DeviceSupport(True, notes=tuple(notes))


def _generation(device: Device) -> Generation | None:
    known = {generation.key: generation for generation in GENERATIONS}
    if device.generation is None or device.generation in known:
        return known.get(device.generation or "")
    near = difflib.get_close_matches(device.generation, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(
        f"--device={device.name}: generation={device.generation!r} must be one of {', '.join(known)}.{hint}"
    )


def _override_recipes(overrides: Mapping[str, Any]) -> Iterator[str]:
    """Recipes named in overrides, including those for single GEMMs and operands."""
    for value in overrides.values():
        if isinstance(value, Mapping):
            yield from _override_recipes(value)
        elif isinstance(value, str) and value in RECIPES:
            yield value
