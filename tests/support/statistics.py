"""Telemetry's statistics written out in float64 numpy from dumped tensors and codes: the package computes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.support import reference
from megatron_fp8.telemetry.tensor_stats import Measurement

EXACT = ("min", "max", "cur_amax", "nonfinite", "underflows%", "overflows%", "scale_inv_min", "scale_inv_max")
"""What must be right to the bit; the others to 1e-6."""


def merge(pieces: Iterable[Measurement]) -> Measurement:
    """The figures of the whole from those of its pieces: sums add up, of extremes the largest counts."""
    sums, extremes = zip(*pieces, strict=True)
    return Measurement(torch.stack(sums).sum(0), torch.stack(extremes).amax(0))


@dataclass(frozen=True)
class Dump:
    """One side of a quantized matrix in the matrix's orientation: codes (uint8), a scale each, the largest code."""

    codes: np.ndarray
    scale: np.ndarray
    fp8_max: float
    values: np.ndarray


def dump(quantized, columnwise: bool = False) -> Dump:
    """From a Float8Tensor."""
    side = quantized.columnwise if columnwise else quantized.rowwise
    codes = side.codes.contiguous().view(torch.uint8).numpy()
    scale = side.scale_inv.contiguous()
    if scale.dtype == torch.float8_e8m0fnu:
        scale = np.ldexp(1.0, scale.view(torch.uint8).numpy().astype(np.int64) - 127)
    else:
        scale = scale.numpy().astype(np.float64)
    height, width = (side.granularity.rows or codes.shape[0]), (side.granularity.cols or codes.shape[1])
    if scale.ndim == 2:
        scale = np.repeat(np.repeat(scale, height, 0), width, 1)[: codes.shape[0], : codes.shape[1]]
    scale = np.broadcast_to(scale, codes.shape)
    spec = reference.E4M3 if side.codes.dtype == torch.float8_e4m3fn else reference.E5M2
    values = spec.values()[codes] * scale
    return Dump(
        *(a.T if columnwise else a for a in (codes, scale)), spec.largest, values.T if columnwise else values
    )


def of_values(x: np.ndarray) -> dict[str, float]:
    """The statistics of values (float64, any shape), those that are defined."""
    good = x[np.isfinite(x)]
    found = {"nonfinite": float(x.size - good.size)}
    if good.size == 0:
        return found
    size = np.abs(good)
    found |= {"min": good.min(), "max": good.max(), "mean": good.mean(), "cur_amax": size.max()}
    found |= {"l1_norm": size.sum(), "l2_norm": math.sqrt((good**2).sum())}
    if good.size > 1:
        found["std"] = good.std(ddof=1)
    if size.any():
        found["dynamic_range"] = math.log2(size.max()) - math.log2(size[size > 0].min())
    spread = good - good.mean()
    if (spread**2).mean() > 1e-15 * (good**2).mean():
        found["kurtosis"] = (spread**4).mean() / (spread**2).mean() ** 2
    return {name: float(value) for name, value in found.items()}


def of_codes(x: np.ndarray, of: Dump) -> dict[str, float]:
    """The statistics of codes that were made of x [rows, cols]."""
    if x.size == 0:
        return {}
    good = np.isfinite(x)
    vanished = good & (x != 0) & ((of.codes & 0x7F) == 0)
    beyond = good & (np.abs(x) > of.fp8_max * of.scale * (1 + 2.0**-21))
    found = {
        "underflows%": 100 * vanished.sum() / x.size,
        "overflows%": 100 * beyond.sum() / x.size,
        "scale_inv_min": of.scale.min(),
        "scale_inv_max": of.scale.max(),
    }
    if good.any():
        error, signal = ((of.values - x)[good] ** 2).sum(), (x[good] ** 2).sum()
        found["mse"] = error / good.sum()
        if error > 0:
            found["sqnr_db"] = 10 * math.log10(signal / error)
    return {name: float(value) for name, value in found.items()}


def blockwise_range(x: np.ndarray, height: int, width: int) -> float:
    """The largest dynamic range of a block of x [rows, cols], which is not empty."""
    found = 0.0
    for top in range(0, x.shape[0], height):
        for left in range(0, x.shape[1], width):
            size = np.abs(x[top : top + height, left : left + width])
            size = size[np.isfinite(size) & (size > 0)]
            if size.size:
                found = max(found, math.log2(size.max()) - math.log2(size.min()))
    return found


def assert_statistics(
    found: Mapping[str, float], expected: Mapping[str, float], values: np.ndarray, what: str
) -> None:
    """The same names, exact where they must be, else to 1e-6; a mean to 1e-12 of the mean magnitude too."""
    assert set(found) == set(expected), f"{what}: {sorted(set(found) ^ set(expected))}"
    good = np.abs(values[np.isfinite(values)])
    for name, value in expected.items():
        if name.rpartition("scaling_")[2].removeprefix("mxfp8_").removesuffix("_columnwise") in EXACT:
            assert found[name] == value, f"{what}: {name} {found[name]!r}, expected {value!r}"
        else:
            slack = (
                {"mean": good.mean() * 1e-12, "std": 1e-6 * math.sqrt((good**2).mean())}.get(name, 0)
                if good.size
                else 0
            )
            assert math.isclose(found[name], value, rel_tol=1e-6, abs_tol=slack), (
                f"{what}: {name} {found[name]!r}, expected {value!r}"
            )
