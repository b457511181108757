"""MX blocks with E5M2 gradients are said once; nothing else is."""

import pytest
import torch

from megatron_fp8.files import terminal
from megatron_fp8.numerics.formats import E4M3, E5M2, Format
from megatron_fp8.plan.resolve import warn_of_high_precision
from megatron_fp8.plan.site_plan import bf16_site, fp8_site
from megatron_fp8.recipe import RECIPES


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(terminal, "_printed", set())


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("custom", "nvfp4")])
@pytest.mark.parametrize("fmt", [Format.HYBRID, Format.E4M3])
def test_only_mx_with_e5m2(name, fmt, capsys):
    plans = [
        bf16_site("a", None, ""),
        *(fp8_site(n, 0, RECIPES[name](fp8_format=fmt), "emulated", "") for n in "bc"),
    ]
    for _ in range(2):
        warn_of_high_precision(plans, "the remedy")
    said = capsys.readouterr().err
    if (name, fmt) == ("mxfp8", Format.HYBRID):
        assert said.count("\n") == 1 and "the remedy" in said
    else:
        assert said == ""


def test_what_it_says_is_so():
    """The bit is worth 6 dB on gradients of any spread that a block has, here normal numbers times powers of two."""
    from megatron_fp8 import quantize

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 256, generator=generator) * torch.exp2(torch.randn(256, 1, generator=generator) * 8)
    noise = {}
    for fmt in (Format.HYBRID, Format.E4M3):
        q = quantize(x, RECIPES["mxfp8"](fp8_format=fmt), "grad_output").dequantize(torch.float32)
        noise[fmt] = float((q - x).square().sum(1).div(x.square().sum(1)).log10().mean() * 10)
    assert 5.5 < noise[Format.HYBRID] - noise[Format.E4M3] < 6.5
    assert (E4M3.max, E5M2.max) == (448.0, 57344.0)
