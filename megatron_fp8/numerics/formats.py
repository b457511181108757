"""The formats of codes and scales, as data. Casts and scales derive all their constants from them.

NaN, Inf, zero and saturation:

* E4M3 (OCP "FN") has no Inf: its only specials are the NaN codes 0x7F and 0xFF. Its largest number is 448, not the
  240 of an IEEE-style formula, because the top exponent also encodes numbers.
* E5M2 is IEEE-like: Inf is 0x7C / 0xFC, NaN is 0x7D-0x7F (and their negatives). Largest number 57344.
* E2M1 has 15 numbers (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), no Inf and no NaN. A byte holds two codes, the
  first in the low four bits.
* E8M0 is a scale format: eight exponent bits, no sign, no zero, no Inf; 0xFF is NaN.

Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0; OCP Microscaling Formats (MX) 1.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch


@dataclass(frozen=True)
class FloatFormat:
    """One floating-point format.

    Args:
        name: short lower-case name, as used on the command line and in reports.
        dtype: the torch dtype whose bytes are this format's codes; of E2M1 a byte is two.
        exponent_bits, mantissa_bits, bias: the layout; value = 2^(e - bias) * 1.m for normal codes.
        max: largest finite value.
        has_inf: whether the format has codes for infinity.
        signed: E8M0 has no sign bit.
    """

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_inf: bool
    signed: bool = True

    @property
    def max_exponent(self) -> int:
        """floor(log2(max)): 8 for E4M3, 15 for E5M2, 2 for E2M1. MX calls it emax."""
        return math.frexp(self.max)[1] - 1

    @property
    def codes_per_byte(self) -> int:
        """2 for E2M1, else 1."""
        return 8 // (self.signed + self.exponent_bits + self.mantissa_bits)

    @property
    def smallest(self) -> float:
        """The smallest value above zero, a subnormal (E8M0 has none). Values up to half of it round to zero."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    def __reduce__(self) -> str | tuple[object, ...]:
        """Copies and pickles of this file's formats are the same objects, since code compares them by identity."""
        return self.name.upper() if globals().get(self.name.upper()) == self else super().__reduce__()


E4M3 = FloatFormat("e4m3", torch.float8_e4m3fn, 4, 3, 7, 448.0, has_inf=False)
E5M2 = FloatFormat("e5m2", torch.float8_e5m2, 5, 2, 15, 57344.0, has_inf=True)
E2M1 = FloatFormat("e2m1", torch.float4_e2m1fn_x2, 2, 1, 1, 6.0, has_inf=False)
E8M0 = FloatFormat("e8m0", torch.float8_e8m0fnu, 8, 0, 127, 2.0**127, has_inf=False, signed=False)

ROLES = ("input", "weight", "grad_output")
"""The three operands of a linear layer's GEMMs. input and weight belong to the forward, grad_output to the backward."""


class Format(Enum):
    """The format of each role; the names are Transformer Engine's.

    ``E4M3``: E4M3 for all three roles. ``HYBRID``: E4M3 for input and weight, E5M2 for grad_output, which needs range
    more than precision (Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433).
    """

    E4M3 = "e4m3"
    HYBRID = "hybrid"

    @property
    def fwd(self) -> FloatFormat:
        """Format of input and weight."""
        return E4M3

    @property
    def bwd(self) -> FloatFormat:
        """Format of grad_output."""
        return E5M2 if self is Format.HYBRID else E4M3

    def for_role(self, role: str) -> FloatFormat:
        """Format of ``role``; ValueError for a name that is not one of ROLES."""
        if role not in ROLES:
            raise ValueError(f"role {role!r} is unknown: choose one of {', '.join(ROLES)}")
        return self.bwd if role == "grad_output" else self.fwd


def parse_format(name: str | Format) -> Format:
    """Returns the Format of a name ('e4m3' or 'hybrid', any case); ValueError names the value and the choices."""
    if isinstance(name, Format):
        return name
    try:
        return Format(str(name).lower())
    except ValueError:
        raise ValueError(
            f"fp8 format {name!r} is unknown: use 'hybrid' (E4M3 forward, E5M2 gradients) or 'e4m3' (E4M3 everywhere)"
        ) from None


def format_of(dtype: torch.dtype) -> FloatFormat:
    """Returns the format whose codes have this torch dtype; ValueError for any other dtype (FNUZ variants included)."""
    for fmt in (E4M3, E5M2, E2M1, E8M0):
        if fmt.dtype == dtype:
            return fmt
    raise ValueError(
        f"{dtype} is not a format of this package: codes are float8_e4m3fn, float8_e5m2 or float4_e2m1fn_x2, MX scales"
        " float8_e8m0fnu"
        " (AMD's FNUZ variants have another bias and another zero, so the same bytes mean other numbers)"
    )
