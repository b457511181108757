"""A GEMM site for experiments: another's, with some of its operands in high precision.

What is left in FP8 is cast by the very quantizers of the site, with its delayed scales, and multiplied by it: whatever is
wrong there shows. The weight is kept apart, and random bits are those of the site's first backward of the iteration.

An operand that is not quantised can be rounded in place of it, to as many significant bits as a format has, with no
limit to its exponent. That is a format at its best, whatever the scales: what a site in FP8 is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

import torch

from ..kernels.gemms import matmul_high_precision
from ..plan.cast_spec import READERS
from ..quantizer import Casts
from ..recipe import GEMM_OPERANDS
from ..tensor import Operand
from .gemm_site import GemmSite

Cell = tuple[str, str]
"""One operand of one GEMM: ('dgrad', 'weight')."""


class SimulatedSite(GemmSite):
    """``site.replaced_by(SimulatedSite(site, ...))`` runs it in the site's place.

    Args:
        site: whose quantizers, products and random numbers it uses.
        quantized: the operands that are quantised, of those that the site's plan quantises. A GEMM with one of its two
            runs in high precision, that one dequantised.
        rounded: of operands that are not quantised, to how many significant bits they are rounded.

    With neither, the layer runs in high precision as one that the plan leaves there.
    """

    def __init__(self, site: GemmSite, quantized: Set[Cell], rounded: Mapping[Cell, int]):
        operands = {
            gemm: {role: cast if (gemm, role) in quantized else None for role, cast in casts.items()}
            for gemm, casts in site.plan.operands.items()
        }
        casts = {}
        for role, (first, second) in READERS.items():
            own = site.casts[role]
            casts[role] = Casts(
                own.rowwise if (first, role) in quantized else None,
                own.columnwise if (second, role) in quantized else None,
            )
        plan = replace(site.plan, operands=operands, precision="fp8" if quantized or rounded else "bf16")
        super().__init__(plan, site.state, None, seed=site.seed, stream=site.stream, casts=casts)
        self._site, self._rounded = site, dict(rounded)

    def multiply(
        self,
        gemm: str,
        a: Operand,
        b: Operand,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        *,
        record: bool = True,
    ) -> torch.Tensor:
        """As the site does where both are quantised."""
        if self.plan.gemms[gemm] == "fp8":
            return self._site.multiply(gemm, a, b, out_dtype, bias, record=record)
        operands = [
            round_significand(operand, self._rounded[gemm, role])
            if (gemm, role) in self._rounded and isinstance(operand, torch.Tensor)
            else operand
            for role, operand in zip(GEMM_OPERANDS[gemm], (a, b), strict=True)
        ]
        if operands[0] is a and operands[1] is b:
            return self._multiply(gemm, a, b, out_dtype, bias)
        self.state.counts.hp_gemms += 1
        first, second = (x if isinstance(x, torch.Tensor) else x.dequantize(torch.float32) for x in operands)
        return matmul_high_precision(first.to(torch.float32), second.to(torch.float32), out_dtype, bias)


def round_significand(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x, of any shape and floating dtype, as float32 with so many significant bits, to nearest even, at any exponent. NaN
    and Inf stay.

    x is scaled by 4/3 on the way there and back, so that values which have no more bits than that are rounded too: to
    round BF16 values to BF16 again shows what one such rounding does.
    """
    scaled = x.to(torch.float32) * (4 / 3)
    mantissa, exponent = torch.frexp(scaled)
    rounded = torch.ldexp((mantissa * 2.0**bits).round() * 2.0**-bits, exponent) * 0.75
    return torch.where(x.isfinite(), rounded, x.to(torch.float32))
