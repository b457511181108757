"""The native backend: Triton quantization kernels and FP8 tensor cores.

products.py multiplies. layout.py has the requirements of torch's products on operands; probe.py tests what this machine
supports. If nothing can multiply, ``supports`` returns the reason before a model is built; nothing falls back to BF16.

wgrad sums over tokens. An expert may have any number of them, but torch's products sum over a multiple of 16 or over
whole blocks. So casts for a product write zeros after the last token of columnwise codes (``padded_length``), without a
launch or a copy. Other codes (gathered, saved by compiled code, rounded stochastically) have no padding. They are padded
by a copy if the other operand is longer (``pad_to_same_length``) or as the product needs (placement.place_codes).

NVFP4's casts, and what its product needs beside its operands, are in fp4.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...kernels.lazy_tensor import materialize, source_of
from ...numerics.formats import E4M3, ROLES
from ...numerics.rule import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Direction, Granularity, Rule
from ...recipe import Products, Recipe
from ...tensor import Float8Tensor, QuantizedSide
from .. import reference
from ..base import AmaxReduction, CastRequest, CastResult, Region, RunningAmax
from . import fp4
from .layout import (
    BLOCK_ROWS,
    Mode,
    Refusal,
    Request,
    padded_sizes,
    uses_cutlass,
)
from .probe import (
    device_reason,
    gemms_of,
    kernel_gemms,
    missing_product,
    mx_gemms,
    plan_for,
    reads_transposed,
    refusals,
    requests,
    rules_of,
    runs_as_mx,
)  # fmt: skip
from .products import accumulate, gemm, grouped_gemm, multiply

if TYPE_CHECKING:
    from ...kernels import quantize as casts

__all__ = [
    "accumulate", "advice", "gemm", "grouped_gemm", "kernels_cast", "name", "notes", "padded_products", "quantize",
    "rounds_once", "supports", "turns_codes",
]  # fmt: skip
"""What backends/__init__.py documents. Products are products.py's."""

name = "native"

Remedy = Literal["e4m3", "pow2", "mxfp8", "tensorwise"]
"""A change of a recipe by which torch can multiply (fast), or the recipe to take instead."""


def supports(device: torch.device, recipe: Recipe | Products | None = None) -> str | None:
    """Why this backend cannot run on the device, or cannot run the recipe's GEMMs there; None if it can.

    With a recipe, every kind of product that its three GEMMs may need (16-bit and float32 results, bias) is tried once
    a process, so that no step fails or has to try.
    """
    reason = device_reason(device)
    if reason is not None or recipe is None:
        return reason
    refusal = refusals(device, multiply)
    for rule in {rule for pair in gemms_of(recipe).values() for rule in pair if rule.granularity.is_tensor}:
        reads_transposed(rule.fmt, refusal)
    return missing_product(recipe, refusal) or fp4.cast_reason(recipe, device)


def notes(device: torch.device, recipe: Recipe | Products) -> list[str]:
    """Roles without a kernel, which reference.py quantizes on the same device, and why; and GEMMs of blocks that this
    package's kernel or the MX product multiplies, since torch has no other. For recipes that ``supports`` accepts."""
    refusal = refusals(device, multiply)
    found = [f"{which} by this package's block-scaled kernel" for which in kernel_gemms(recipe, refusal)]
    found += [
        f"{which} by the MX product, each scale for four blocks of 32" for which in mx_gemms(recipe, refusal)
    ]
    for role in ROLES:
        for rule in rules_of(recipe, role):
            reason = kernel_reason(rule)
            if reason is not None:
                found.append(f"{role} quantized without a kernel (the same codes, slower): {reason}")
    return found


def advice(device: torch.device, recipe: Recipe | Products) -> tuple[str, Remedy | None] | None:
    """Advice on GEMMs that will be slow, because torch has no such product; None if there are none.

    Args:
        recipe: one that ``supports`` accepts.

    Returns:
        What multiplies instead, and why; and the change with which torch multiplies: gradients in 'e4m3', scales as
        'pow2', another recipe, or None if no change helps.
    """
    refusal = refusals(device, multiply)
    slow = kernel_gemms(recipe, refusal)
    if not slow:
        return _advice_of_rows(recipe, refusal)
    pairs = [gemms_of(recipe)[which] for which in slow]
    asked = replace(plan_for(*pairs[-1], torch.bfloat16, None, refusal).request, by="torch")
    gemms = ", ".join(slow[:-1]) + (" and " if slow[:-1] else "") + slow[-1]
    what = f"{gemms} by this package's Triton kernel, probably slower than BF16: torch has no {asked} ({refusal(asked)})"
    changes: dict[Remedy, dict[str, Any]] = {"e4m3": {"fmt": E4M3}, "pow2": {"scale": "pow2"}}
    for remedy, change in changes.items():
        others = [(replace(a, **change), replace(b, **change)) for a, b in pairs]
        if not any(plan_for(a, b, torch.bfloat16, None, refusal).request.triton for a, b in others):
            return what, remedy
    return what, None


def _advice_of_rows(recipe: Recipe | Products, refusal: Refusal) -> tuple[str, Remedy] | None:
    """``advice`` for scales per row where torch multiplies them by CUTLASS."""
    slow = [
        which
        for which, (a, b) in gemms_of(recipe).items()
        if ROW in (a.granularity, b.granularity) and uses_cutlass(a.fmt.dtype, b.fmt.dtype, refusal)
    ]
    if not slow:
        return None
    mx = Request(Mode.MX, E4M3.dtype, E4M3.dtype, torch.bfloat16)
    what = (
        f"scales per row ({', '.join(slow)}) are multiplied by CUTLASS, or with slow accumulation by a pass after the"
        " product: torch has no cuBLAS product of them here"
    )
    return what, "mxfp8" if None in (refusal(mx), refusal(replace(mx, by="torch v1"))) else "tensorwise"


_FITS = 512
"""A number of tokens that no product pads."""


def padded_products(device: torch.device, recipe: Recipe | Products, n: int, k: int) -> list[str]:
    """The GEMMs of a weight [N, K] whose operands are padded for any number of tokens. For recipes that ``supports``
    accepts."""
    sizes = {"fprop": (_FITS, n, k), "dgrad": (_FITS, k, n), "wgrad": (n, k, _FITS)}  # M, N, K
    found = []
    for which, request in requests(recipe, refusals(device, multiply)).items():
        if padded_sizes(request, *sizes[which]) != sizes[which]:
            found.append(which)
    return found


_WITH_FLOAT_SCALES = frozenset((TENSOR, ROW, BLOCK_1X128, BLOCK_128X128))


def kernel_reason(rule: Rule) -> str | None:
    """Why no Triton kernel quantizes by this rule; None if one does."""
    granularity, scale = rule.granularity, rule.scale
    if scale == "e4m3":
        return None
    if rule.stochastic:
        return "stochastic rounding"
    if granularity in _WITH_FLOAT_SCALES and scale != "e8m0":
        return None
    return None if granularity == BLOCK_1X32 else f"{granularity} blocks with {scale} scales"


def kernels_cast(rule: Rule) -> bool:
    """Whether a Triton kernel quantizes by this rule."""
    return kernel_reason(rule) is None


def turns_codes(rule: Rule) -> bool:
    """Whether the columnwise side of an input is a transposed view of codes in row order: only without a kernel."""
    return not kernels_cast(rule)


rounds_once = True
"""A 16-bit result of ``gemm`` is the float32 sum, rounded once."""


def quantize(
    x: torch.Tensor,
    rule: Rule,
    direction: Direction,
    *,
    scale: torch.Tensor | None = None,
    reduce_amax: AmaxReduction | None = None,
    region: Region | None = None,
    running: RunningAmax | None = None,
    for_product: bool = False,
) -> CastResult:
    """Quantizes a matrix in one or both directions; arguments, errors and bits are those of reference.quantize.

    Args:
        running: receives amax and non-finite count. With a kernel the result has these in place of the cast's own.
        for_product: the sides have ``gemm``'s layout: scales of the MX product in tiles, columnwise codes padded with
            zeros to a whole block (QuantizedSide's tiled and padding), and memory for a multiple of 4 rows.

    x is read once for both directions if the rule allows it (delayed, blocks), else twice. A LazyTensor is computed while
    it is read, and not stored: computing it twice moves fewer bytes than writing and reading it. The columnwise side's
    codes are contiguous [cols, rows], or for products that read them so (Blackwell's, with one scale) a view of the
    rowwise codes, half the bytes to write; block scales have the GEMM's layout. The host does not wait: the amax and the
    non-finite count stay on the GPU.
    """
    if kernel_reason(rule) is not None:
        x = materialize(x)
        return reference.quantize(CastRequest(x, rule, direction, scale, running, reduce_amax, region))
    if rule.scale == "e4m3":
        return fp4.quantize(CastRequest(x, rule, direction, scale, running, reduce_amax, region, for_product))
    from ...kernels import quantize as casts  # loads Triton, which importing the package must not

    # The only scale that is computed from a recorded amax.
    tensorwise = scale is None and rule.granularity.is_tensor
    record = _record(x.device, running, tensorwise)
    matrix = source_of(x)
    granularity, pow2 = rule.granularity, rule.pow2
    tiled = for_product and (rule.scale == "e8m0" or runs_as_mx(rule, refusals(x.device, multiply)))
    pad_to = padded_length(granularity) if for_product else 1
    wanted, is_view = direction, for_product and _serves_both(x.shape, rule, x.device)
    direction = "rowwise" if is_view else direction
    how: dict[str, Any] = {"margin": rule.margin, "epsilon": rule.epsilon, "pad_to": pad_to}
    if scale is not None:
        sides = casts.quantize_tensor(matrix, rule.fmt, direction, scale=scale, record=record, **how)
    elif tensorwise:
        casts.measure(matrix, record=record)
        shared = record.amax
        if reduce_amax is not None:
            shared = shared if running is not None else shared.clone()  # the result has this rank's
            reduce_amax(shared)
        sides = casts.quantize_tensor(matrix, rule.fmt, direction, amax=shared, pow2=pow2, **how)
    elif granularity == ROW:
        row_amax, col_amax = casts.measure(
            matrix, rows=direction != "columnwise", cols=direction != "rowwise", record=record
        )
        if col_amax is not None and reduce_amax is not None:
            reduce_amax(col_amax)
        sides = casts.quantize_rows(matrix, rule.fmt, row_amax, col_amax, pow2=pow2, **how)
    else:
        sides = casts.quantize_blocks(
            matrix,
            rule.fmt,
            direction,
            block=granularity.cols,
            square=granularity.symmetric,
            kind=rule.scale,
            tiled=tiled,
            room=BLOCK_ROWS if for_product else 1,
            record=record,
            **how,
        )
    amax = record.amax if running is None else running.amax
    quantized = _as_tensor(sides, x, rule, wanted, tiled=tiled, is_view=is_view)
    return CastResult(quantized, amax, record.nonfinite)


def _record(device: torch.device, running: RunningAmax | None, tensorwise: bool) -> casts.Record:
    """Where a cast's kernels write amax and non-finite count; ``tensorwise``: its own amax apart, for its scale."""
    from ...kernels import quantize as casts
    from ...kernels import zero_pool

    if running is None:
        return casts.Record.new(device)
    if tensorwise:
        return casts.Record(zero_pool.take(device)[0], running.nonfinite, running.amax)
    return casts.Record(running.amax, running.nonfinite)


def _as_tensor(
    sides: casts.Sides, x: torch.Tensor, rule: Rule, direction: Direction, *, tiled: bool, is_view: bool
) -> Float8Tensor:
    """The kernels' (codes, scale_inv) of each side as a tensor; ``is_view``: columnwise is rowwise, transposed."""
    row, column = sides
    padding = 0 if column is None else column.codes.shape[1] - x.shape[0]
    rowwise = row and QuantizedSide(*row, rule.granularity, rule.pow2, tiled=tiled)
    columnwise = column and QuantizedSide(*column, rule.granularity, rule.pow2, tiled=tiled, padding=padding)
    if is_view and direction != "rowwise":
        assert rowwise is not None
        columnwise = rowwise.transposed()
        rowwise = rowwise if direction == "both" else None
    return Float8Tensor(rowwise, columnwise, x.dtype)


def _serves_both(shape: Sequence[int], rule: Rule, device: torch.device) -> bool:
    """Whether products read the codes of a matrix of this shape in both directions."""
    fits = rule.granularity.is_tensor and shape[0] % 16 == shape[1] % 16 == 0
    return fits and reads_transposed(rule.fmt, refusals(device, multiply))


def padded_length(granularity: Granularity) -> int:
    """Multiple to which the contraction dimension is padded: the block's width, at least 16."""
    return max(granularity.cols, 16)
