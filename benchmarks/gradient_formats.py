"""The SQNR of gradients in E5M2 and in E4M3, by recipe: what fp8='hybrid' costs and what it buys.

python -m benchmarks.gradient_formats    prints the table that docs/recipes.md has
"""

from __future__ import annotations

import torch

from megatron_fp8 import Format, quantize
from megatron_fp8.recipe import RECIPES

NAMES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
SPREADS = {"normal": 0.0, "rows over 2^±8": 4.0, "rows over 2^±24": 12.0}
"""Standard deviation of the binary logarithm of a row's size."""
FORMATS = (Format.HYBRID, Format.E4M3)


def sqnr(recipe: str, fmt: Format, spread: float) -> float:
    """Mean over rows of a row's signal-to-quantization-noise ratio, in dB, of [512, 512] numbers of fixed seed."""
    generator = torch.Generator("cpu").manual_seed(0)
    size = torch.exp2(spread * torch.randn(512, 1, generator=generator, dtype=torch.float64, device="cpu"))
    x = torch.randn(512, 512, generator=generator, dtype=torch.float64, device="cpu") * size
    x = x.to(torch.float32)
    codes = quantize(x, RECIPES[recipe](fp8_format=fmt), "grad_output").dequantize(torch.float32)
    noise = (codes.double() - x.double()).square().sum(1)
    return float((x.double().square().sum(1) / noise).log10().mean() * 10)


def table() -> str:
    """Markdown; recipes with the same figures are one column."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for name in NAMES:
        cells = [f"{sqnr(name, fmt, spread):.1f}" for spread in SPREADS.values() for fmt in FORMATS]
        columns.setdefault(tuple(cells), []).append(name)
    head = "".join(f" {', '.join(names)}: E5M2 | E4M3 |" for names in columns.values())
    lines = [f"| gradients |{head}", "|---" * (2 * len(columns) + 1) + "|"]
    for row, data in enumerate(SPREADS):
        cells = [cell for column in columns for cell in column[2 * row : 2 * row + 2]]
        lines.append(f"| {data} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def section() -> str:
    """What docs/recipes.md says about it."""
    return (
        "## E5M2 or E4M3 for gradients\n\n"
        "`fp8='hybrid'` has gradients in E5M2, `fp8='e4m3'` in E4M3: a bit of mantissa more, and 2^14 less range. SQNR\n"
        "in dB (higher is better) of gradients whose rows are of one size, or of different ones:\n\n"
        f"{table()}\n\n"
        "With mxfp8 take E4M3: a block of 32 needs no range, and a run with `fp8='hybrid', fp8_recipe='mxfp8'` says so.\n"
        "Blocks of 128 gain as much here, but reports of trainings disagree ([TransformerEngine #2754]"
        "(https://github.com/NVIDIA/TransformerEngine/issues/2754)):\n"
        "measure it. One scale for a whole tensor needs E5M2 where rows differ much.\n\n"
        "Made by `python -m benchmarks.gradient_formats`.\n"
    )


if __name__ == "__main__":
    print(section())
