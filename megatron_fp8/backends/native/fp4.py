"""NVFP4 on NVIDIA GPUs: casts, a check of their codes, the product's factor.

The product is torch's with scales per 1x16 block and one factor, which cuBLASLt reads on the GPU as alpha.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ... import kernels
from ...kernels.lazy_tensor import source_of
from ...numerics.cast import RandomKey
from ...numerics.formats import E2M1
from ...numerics.rule import BLOCK_1X16, BLOCK_16X16, Rule
from ...recipe import Products, Recipe, products_of
from ...tensor import Float8Tensor, QuantizedSide
from .. import fp4 as specified
from ..base import CastRequest, CastResult, Region
from . import placement
from .layout import FP4_BLOCK, FP4_K


def quantize(request: CastRequest) -> CastResult:
    """backends/fp4.py's ``quantize``, by kernels: the same bits, in the native backend's layouts."""
    x, rule, direction, static, running, reduce_amax, region, for_product = request
    from ...kernels import fp4_quantize  # loads Triton

    matrix = source_of(x)
    square, transformed = rule.granularity.symmetric, rule.hadamard and direction != "rowwise"
    nonfinite = (
        torch.zeros((), dtype=torch.float32, device=x.device) if running is None else running.nonfinite
    )
    amaxes = fp4_quantize.find_amaxes(
        matrix,
        transformed=transformed,
        nonfinite=nonfinite,
        running=None if running is None else running.amax,
    )
    own = amaxes[0] if running is None else running.amax
    if reduce_amax is not None:
        own = own.clone() if running is None else own  # the result has this rank's
        reduce_amax(amaxes)
    if static is not None:
        own = own.clone()
        amaxes.copy_(static.expand_as(amaxes))
    draws = None
    if rule.stochastic:
        assert region is not None, "stochastic rounding needs a region to draw its bits from"
        step = region.total_cols or x.shape[1]
        draws = fp4_quantize.Draws(region.key, region.row_offset * step + region.col_offset, step)
    made = fp4_quantize.cast(
        matrix,
        direction,
        amaxes,
        square=square,
        transformed=transformed,
        draws=draws,
        tiled=for_product,
        pad_to=FP4_K if for_product else FP4_BLOCK,
    )
    rowwise, columnwise = (
        None
        if side is None
        else QuantizedSide(
            side.codes,
            side.scales,
            rule.granularity,
            False,
            True,
            tiled=for_product,
            padding=E2M1.codes_per_byte * side.codes.shape[1] - cols,
            tensor_amax=side.amax,
            hadamard=hadamard,
        )
        for side, cols, hadamard in zip(made, (x.shape[1], x.shape[0]), (False, transformed), strict=True)
    )
    return CastResult(Float8Tensor(rowwise, columnwise, x.dtype), own, nonfinite)


# --------------------------------------------------------------------------------------------------------- the product

_last: list[Any] = []
"""The stream of the last product, whether it was captured, and the device of the first one."""


def factors(a: QuantizedSide, b: QuantizedSide) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The scales of a and b that the product multiplies by, after their blocks': float32 [] each, the factor and 1.

    torch 2.10 to 2.13 copies their product to one place of the process, where cuBLASLt reads it when the GPU comes to it
    (pytorch#191536). So a product on another stream waits for those before it.

    Raises:
        RuntimeError: this GPU cannot read the place, which is another GPU's.
    """
    device = a.codes.device
    if device.type == "cuda":
        _wait_for_the_last(device)
    assert a.tensor_amax is not None and b.tensor_amax is not None
    if not placement.has_kernels(a.codes):
        factor = specified.tensor_factor(a, b)
        return [factor], [torch.ones_like(factor)]
    from ...kernels.fp4_quantize import product_factor  # loads Triton

    factor, one = product_factor(a.tensor_amax, b.tensor_amax)
    return [factor], [one]


def _wait_for_the_last(device: torch.device) -> None:
    stream, capturing = torch.cuda.current_stream(device), torch.cuda.is_current_stream_capturing()
    before, was_capturing, first = _last or (stream, capturing, device)
    if first != device and not torch.cuda.can_device_access_peer(device, first):
        raise RuntimeError(
            f"torch keeps the factor of NVFP4 products on {first}, which {device} cannot read: use one process a GPU"
        )
    # A captured graph has its own order, and nothing outside may wait for it.
    if before != stream and capturing == was_capturing:
        stream.wait_stream(before)
    _last[:] = [stream, capturing, first]


# ----------------------------------------------------------------------------------------------------------- the check


def cast_reason(recipe: Recipe | Products, device: torch.device) -> str | None:
    """Why the kernels cannot cast by the recipe's NVFP4 rules on the device; None if they can, or it has none."""
    used = {rule for pair in products_of(recipe).values() for rule in pair if rule is not None}
    return _wrong_codes(device) if any(rule.scale == "e4m3" for rule in used) else None


@lru_cache(maxsize=64)
@torch.no_grad()
def _wrong_codes(device: torch.device) -> str | None:
    """Compares each kind of cast with the specification, once a process. On sm_120 an instruction that is missing there
    gave Transformer Engine gradients of zero, without an error."""
    x = torch.randn(70, 144, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    x[3, 5], x[7, 8], x[16:32, 32:64] = torch.nan, -torch.inf, -0.0
    x = x.to(torch.bfloat16)
    region = Region(RandomKey(1, 2, 3, 4))
    for granularity, hadamard, stochastic in (
        (BLOCK_1X16, True, False),
        (BLOCK_1X16, True, True),
        (BLOCK_1X16, False, False),
        (BLOCK_16X16, False, False),
    ):
        rule = Rule(E2M1, granularity, "e4m3", stochastic=stochastic, hadamard=hadamard)
        request = CastRequest(x, rule, "both", region=region)
        expected = specified.quantize(request).tensor
        try:
            found = quantize(request._replace(x=x.to(device), for_product=True)).tensor
        except torch.OutOfMemoryError:
            raise
        except kernels.refusals() as error:
            return f"its cast to NVFP4 fails: {str(error).strip().partition(chr(10))[0]}"
        for mine, theirs in zip(found.sides, expected.sides, strict=True):
            assert mine is not None and theirs is not None
            plain = mine.plain()
            for one, other in ((plain.codes, theirs.codes), (plain.scale_inv, theirs.scale_inv)):
                if not torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8)):
                    how = "stochastic " if stochastic else ""
                    return f"its {how}cast to NVFP4 gives other codes than specified"
    return None
