"""Writes the conformance kit's golden file: `python -m benchmarks.conformance --write`

Codes and scales come from benchmarks/support/reference.py and nvfp4_reference.py: NumPy, and nothing of the package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save

from benchmarks.support import nvfp4_reference as fp4
from benchmarks.support import reference
from benchmarks.support.reference import E4M3, E5M2, Rule

RESULT = Path(__file__).parents[1] / "megatron_fp8" / "conformance" / "golden.safetensors"

_RULES = {  # name: (specification, block with 0 for the whole extent, kind of scale)
    "e4m3 tensor fp32": (Rule(E4M3, (None, None)), (0, 0), "fp32"),
    "e5m2 tensor fp32": (Rule(E5M2, (None, None)), (0, 0), "fp32"),
    "e4m3 tensor pow2": (Rule(E4M3, (None, None), pow2=True), (0, 0), "pow2"),
    "e4m3 row pow2": (Rule(E4M3, (1, None), pow2=True), (1, 0), "pow2"),
    "e4m3 1x128 pow2": (Rule(E4M3, (1, 128), pow2=True), (1, 128), "pow2"),
    "e4m3 1x128 fp32": (Rule(E4M3, (1, 128)), (1, 128), "fp32"),
    "e4m3 128x128 pow2": (Rule(E4M3, (128, 128), pow2=True), (128, 128), "pow2"),
    "e4m3 1x32 e8m0": (Rule(E4M3, (1, 32), mx=True), (1, 32), "e8m0"),
    "e5m2 1x32 e8m0": (Rule(E5M2, (1, 32), mx=True), (1, 32), "e8m0"),
}


TILES = "tiles"
"""The matrix of which scales are stored in the GEMM's tiles: of whole tiles, since libraries pad differently."""


class Golden(NamedTuple):
    """A case as it is listed, and its tensors."""

    listed: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def matrices() -> dict[str, torch.Tensor]:
    """The matrices by name. Their bits come from integers, the same on every machine."""
    draw = np.random.Generator(np.random.PCG64(20261128))

    def numbers(rows: int, cols: int) -> np.ndarray:
        return (draw.integers(-255, 256, (rows, cols)) * 2.0 ** draw.integers(-12, 1, (rows, 1))).astype(
            np.float32
        )

    plain = torch.from_numpy(numbers(48, 160)).bfloat16()
    outliers = torch.from_numpy(numbers(48, 160)).bfloat16()
    outliers[::7, ::23] *= 2.0**14
    special = torch.from_numpy(numbers(32, 64)).bfloat16()
    special[3, 5], special[9, 40], special[17, 0] = torch.nan, torch.inf, -torch.inf
    special[20:24], special[:, 48:] = 0, special[:, 48:] * 2.0**-120
    return {
        "normal": plain,
        "outliers": outliers,
        "odd": torch.from_numpy(numbers(33, 75)),
        "boundaries": boundaries(draw),
        "special": special,
        TILES: torch.from_numpy(numbers(256, 256)).bfloat16(),
    }


def boundaries(draw: np.random.Generator) -> torch.Tensor:
    """float32 [32, 128], blocks of 16 whose amaxes lie where scales change: in the upper half for NVFP4, where
    amax * (S_enc / 6) and amax / 6 * S_enc round to other scales; in the lower for MX and powers of two."""
    grid = np.unique(fp4.to_e4m3(np.linspace(0, 448, 1 << 20)))
    middles = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    largest, differ = np.float32(0), np.zeros(0, np.float32)
    while len(differ) < 8:
        largest = np.float32(draw.integers(1 << 22, 1 << 23) / (1 << 20))
        encode = np.float32(2688) / largest
        amaxes = (middles / (encode * np.float32(1 / 6)))[:, None].view(np.int32) + np.arange(
            -2, 3, dtype=np.int32
        )
        amaxes = amaxes.view(np.float32).ravel()
        products = amaxes * (encode * np.float32(1 / 6)), amaxes / np.float32(6) * encode
        one, other = (fp4.to_e4m3(each) for each in products)
        differ = amaxes[(one != other) & (amaxes < largest)]
    powers = (
        np.array([1.0, 1.75], np.float32) * np.float32(2.0) ** np.arange(-20, 2, dtype=np.float32)[:, None]
    )
    near = np.concatenate([powers, np.nextafter(powers, np.float32(9)), np.nextafter(powers, np.float32(0))])
    of_blocks = np.concatenate([[largest], np.resize(differ, 127), np.resize(near.ravel(), 128)]).astype(
        np.float32
    )
    below = (draw.integers(-64, 65, (256, 16)) / 64).astype(np.float32)
    below[:, 3] = 1
    return torch.from_numpy((below * of_blocks[:, None]).reshape(32, 128))


def casts() -> torch.Tensor:
    """float32 [1, n]: every code's value, every midpoint, both neighbours of each, and what is no number."""
    grids = [np.asarray(grid, np.float64) for grid in (E4M3.magnitudes(), E5M2.magnitudes(), fp4.VALUES)]
    points = np.concatenate([np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]) for grid in grids])
    points = np.unique(points.astype(np.float32))
    near = np.concatenate(
        [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))]
    )
    near = np.concatenate([near, np.array([1e38, np.inf, np.nan, 1e-45], np.float32)])
    return torch.from_numpy(np.concatenate([near, -near])[None])


def cases() -> Iterator[Golden]:
    """All cases."""
    x = casts().numpy()
    for spec in (E4M3, E5M2):
        yield _golden(
            f"{spec.name} cast", "casts", spec.name, None, "none", codes=reference.cast(x, 1.0, spec)
        )
    yield _golden("e2m1 cast", "casts", "e2m1", None, "none", codes=_packed(fp4.to_e2m1(x)))
    for of, matrix in matrices().items():
        x = matrix.float().numpy()
        if of == TILES:
            yield from _in_tiles(of, x)
            continue
        for name, (rule, block, scale) in _RULES.items():
            codes, inverse = reference.quantize(x, rule)
            yield _golden(f"{name}, {of}", of, rule.spec.name, block, scale, codes=codes, scale_inv=inverse)
        yield from _nvfp4(of, x)


def _nvfp4(of: str, x: np.ndarray) -> Iterator[Golden]:
    turned = fp4.transform(x)
    draws = np.random.Generator(np.random.PCG64(len(of))).integers(0, 256, turned.shape, np.uint8)
    kinds: list[tuple[str, np.ndarray, int, bool, np.ndarray | None]] = [
        ("e2m1 1x16 e4m3", x, 1, False, None),
        ("e2m1 16x16 e4m3", x, 16, False, None),
        ("e2m1 1x16 e4m3 transformed", turned, 1, True, None),
    ]
    if of != "special":
        kinds += [
            ("e2m1 1x16 e4m3 stochastic", x, 1, False, draws),
            ("e2m1 1x16 e4m3 transformed stochastic", turned, 1, True, draws),
        ]
    for name, matrix, rows, hadamard, bits in kinds:
        found = fp4.quantize(matrix, rows, draws=bits)
        tensors = {
            "codes": _packed(found.codes),
            "scale_inv": _bytes(found.scales),
            "amax": np.array(found.amax),
        }
        if bits is not None:
            tensors["random_bytes"] = bits
        yield _golden(
            f"{name}, {of}", of, "e2m1", (rows, 16), "e4m3", hadamard=hadamard, tiled=False, **tensors
        )


def _in_tiles(of: str, x: np.ndarray) -> Iterator[Golden]:
    """Scales as Blackwell's GEMMs read them (cuBLAS, 1D block scaling factors layout)."""
    rule, block, scale = _RULES["e4m3 1x32 e8m0"]
    codes, inverse = reference.quantize(x, rule)
    name = f"e4m3 1x32 e8m0, {of}"
    yield _golden(name, of, "e4m3", block, scale, tiled=True, codes=codes, scale_inv=_tiled(inverse))
    found = fp4.quantize(x, 1, draws=None)
    codes, amax, inverse = _packed(found.codes), np.array(found.amax), _tiled(_bytes(found.scales))
    name = f"e2m1 1x16 e4m3, {of}"
    yield _golden(name, of, "e2m1", (1, 16), "e4m3", tiled=True, codes=codes, scale_inv=inverse, amax=amax)


def _bytes(scales: np.ndarray) -> np.ndarray:
    """The E4M3 bytes of scales."""
    return torch.from_numpy(scales).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _tiled(scales: np.ndarray) -> np.ndarray:
    """Bytes [rows, blocks] of whole tiles of 128 x 4 -> [rows * blocks]."""
    rows, blocks = scales.shape
    i, j = np.meshgrid(np.arange(rows), np.arange(blocks), indexing="ij")
    tile, inside = (i // 128) * (blocks // 4) + j // 4, (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4
    placed = np.empty(rows * blocks, np.uint8)
    placed[tile * 512 + inside] = scales
    return placed


def _packed(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, the first in the low four bits."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def _golden(
    name: str,
    of: str,
    fmt: str,
    block: tuple[int, int] | None,
    scale: str,
    *,
    hadamard: bool = False,
    tiled: bool = False,
    **tensors: np.ndarray,
) -> Golden:
    arrays = {f"{name}/{each}": torch.from_numpy(np.array(array)) for each, array in tensors.items()}
    listed = {"name": name, "x": of, "fmt": fmt, "block": block, "scale": scale, "hadamard": hadamard}
    listed["tiled"] = tiled
    return Golden({**listed, "tensors": sorted(arrays)}, arrays)


def golden_file() -> bytes:
    """The file's bytes."""
    tensors, listed = {"casts": casts(), **matrices()}, []
    for case in cases():
        listed.append(case.listed)
        tensors |= {name: tensor.contiguous() for name, tensor in case.tensors.items()}
    return save(tensors, {"cases": json.dumps(listed)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="replace the golden file")
    data = golden_file()
    if parser.parse_args().write:
        RESULT.write_bytes(data)
    print(f"{len(data):,} bytes, {'written' if RESULT.read_bytes() == data else 'not what the file holds'}")


if __name__ == "__main__":
    main()
