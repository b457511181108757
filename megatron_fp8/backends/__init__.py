"""Backends: modules that quantize and multiply. reference.py quantizes for a backend without kernels of its own.

A backend has (``emulated`` documents the arguments):

* ``name``: its name in configs.
* ``supports(device, recipe)``: why it cannot run on the device, or not this recipe; None if it can.
* ``notes(device, recipe)``: lines for the report on what it does in another way than the recipe says.
* ``turns_codes(rule)``: whether an input's columnwise side is a transposed view of codes in row order. If not, it is
  stored as the product reads it. A compiler needs this before the side exists.
* ``quantize(x, rule, direction, **options)``: a CastResult with the bits of ``reference.quantize``; the options are
  CastRequest's fields.
* ``gemm(a, b, *, out_dtype, bias, fast_accumulation)``: the product of two sides.
* ``grouped_gemm(a, b, outs, *, add, fast_accumulation)``: ``gemm`` of many pairs; ``partial(gemm_in_turn, gemm)`` if
  they have no kernel in common.

It may also have

- ``quantize_each(requests)``: many casts in one call. Without it casts are made one by one.
- ``kernels_cast(rule)``: whether Triton kernels of this package cast by a rule. They take a LazyTensor and
  ``for_product``, return the slot's amax in place of the cast's, and cast FP8 parameters.
- ``accumulate(a, b, into, *, zeros)``: adds a product to a buffer (``zeros``: the buffer is zeros, and may be
  overwritten); False where it cannot. Without it the product is added afterwards.
- ``rounds_once``: True if a 16-bit result of ``gemm`` is the float32 sum, rounded once. Otherwise wgrad asks for float32.
- ``reads_scales``: True if the host reads scales to choose a product, which a CUDA graph cannot capture.
- ``takes_any_size``: True if no size of a matrix is padded. Otherwise inference pads tokens.
- ``padded_products(device, recipe, n, k)``: the GEMMs of a weight [N, K] that copy codes to pad them, for a note.

A backend that is requested by name and cannot run is an error. 'auto' takes the first of BACKENDS that can.

Transformer Engine is another kind of backend. It has whole layers in place of quantize and gemm, and only the layer spec
of a Megatron-Core model can place them. It runs by name alone and never by 'auto': its numbers are not this package's,
and installing it must not change a training.
"""

from __future__ import annotations

from types import ModuleType

import torch

from ..files.terminal import print_rank_0
from ..recipe import Products, Recipe
from . import emulated, transformer_engine
from .native import backend as native_backend

BACKENDS: dict[str, ModuleType] = {"native": native_backend, "emulated": emulated}
"""Backends that quantize and multiply matrices, best first."""

LAYER_BACKENDS: dict[str, ModuleType] = {"transformer_engine": transformer_engine}
"""Backends that bring layers of their own."""


def choose_backend(
    request: str | None,
    device: torch.device,
    recipe: Recipe | Products | None = None,
    *,
    layers: bool = False,
    setting: str = "fp8_backend",
) -> tuple[ModuleType, str]:
    """The backend for a device and a recipe, and why it was taken.

    Args:
        request: a backend's name, or 'auto' or None.
        device: where the operands live.
        recipe: what they are quantized as, where need be for each GEMM; None asks for any.
        layers: whether the caller can place a backend's own layers.
        setting: name of the user's setting, for errors.

    Raises:
        ValueError: the name is unknown or that backend cannot run there; the message says what can.
    """
    if request not in (None, "auto"):
        known = BACKENDS | LAYER_BACKENDS
        if request not in known:
            raise ValueError(
                f"{setting} {request!r} is not in this release: use 'auto' or one of {', '.join(known)}"
                " ('emulated' runs on every device)"
            )
        if request in LAYER_BACKENDS and not layers:
            raise ValueError(
                f"{setting} {request!r} has layers of its own, which only a Megatron-Core model's spec"
                f" (megatron_fp8.mcore.spec) places: here use 'auto' or one of {', '.join(BACKENDS)}"
            )
        reason = known[request].supports(device, recipe)
        if reason is not None:
            raise ValueError(
                f"{setting} {request!r} cannot run on {device}: {reason}; use {setting}='auto'"
                " ('emulated' runs on every device)"
            )
        return known[request], "; ".join(["asked for", *_notes(known[request], device, recipe)])
    reasons: list[str] = []
    for backend_name, backend in BACKENDS.items():
        reason = backend.supports(device, recipe)
        if reason is None:
            return backend, "; ".join([*(reasons or ["the fastest here"]), *_notes(backend, device, recipe)])
        reasons.append(f"not {backend_name}: {reason}")
    raise ValueError(f"no FP8 backend can run on {device}: {'; '.join(reasons)}")


def warn_slow_backend(
    backend: str | None, device: torch.device, recipe: Recipe | Products | None, remedy: str
) -> None:
    """A line on the first rank, once a process, if FP8 will run but not fast: what, why, and what to change.

    Args:
        backend: its name; only the native one is meant to be fast.
        remedy: the setting that makes gradients E4M3, as the caller's users write it.
    """
    found = (
        native_backend.advice(device, recipe)
        if backend == native_backend.name and recipe is not None
        else None
    )
    if found is None:
        return
    what, remedy_kind = found
    remedies = {
        "e4m3": f"{remedy} gives it to torch",
        "pow2": "scales that are powers of two (fp8_pow2_scales=true) give it to torch's MX product",
        "mxfp8": "the recipe mxfp8 is probably faster on this GPU",
        "tensorwise": "the recipes tensorwise and delayed are probably faster here",
        None: "another recipe, such as rowwise, has torch's product",
    }
    print_rank_0(f"megatron_fp8: {what}; {remedies[remedy_kind]}", once=True)


def _notes(backend: ModuleType, device: torch.device, recipe: Recipe | Products | None) -> list[str]:
    return [] if recipe is None else backend.notes(device, recipe)
