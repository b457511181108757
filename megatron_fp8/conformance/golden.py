"""Golden cases: matrices, and the codes and scales that each rule gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

GOLDEN = Path(__file__).with_name("golden.safetensors")


@dataclass(frozen=True)
class Case:
    """A matrix, a rule, and what the rule gives.

    Attributes:
        name: of the case.
        x: [rows, cols], bfloat16 or float32, may hold NaN and Inf. Quantized along cols: a columnwise side is the case of
            the transposed matrix.
        fmt: 'e4m3', 'e5m2' or 'e2m1'.
        block: (rows, cols) that share a scale; 0: the whole extent; None: no scale, a plain cast.
        scale: 'none', 'fp32', 'pow2' (rounded down), 'e8m0' (rounded up) or 'e4m3' (with a float32 scale of the tensor).
        hadamard: x is transformed first (NVFP4).
        tiled: 'scale_inv' is in the tiles of Blackwell's GEMMs, uint8 [row blocks * column blocks].
        random_bytes: uint8 [rows, cols] for stochastic rounding (NVFP4); None: nearest, ties to even.
        expected: 'codes', uint8 [rows, cols], or [rows, cols in whole blocks of 16 / 2] for 'e2m1'. 'scale_inv', float32
            [row blocks, column blocks], uint8 for 'e8m0' and 'e4m3'; absent without a scale. 'amax', float32 [], of the
            tensor, for 'e4m3' scales.
    """

    name: str
    x: torch.Tensor
    fmt: str
    block: tuple[int, int] | None
    scale: str
    hadamard: bool
    tiled: bool
    random_bytes: torch.Tensor | None
    expected: Mapping[str, torch.Tensor]


def load(path: Path = GOLDEN) -> list[Case]:
    """Returns all cases of a golden file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no golden file.
    """
    with safe_open(str(path), framework="pt") as file:
        listed = (file.metadata() or {}).get("cases")
        if listed is None:
            raise ValueError(f"{path} has no list of cases: it is not a golden file of this kit")
        return [_case(each, file) for each in json.loads(listed)]


def _case(listed: Mapping[str, Any], file: Any) -> Case:
    name, block = listed["name"], listed["block"]
    names = {key.rpartition("/")[2]: key for key in listed["tensors"]}
    expected = {
        each: file.get_tensor(names[each]) for each in ("codes", "scale_inv", "amax") if each in names
    }
    return Case(
        name=name,
        x=file.get_tensor(listed["x"]),
        fmt=listed["fmt"],
        block=None if block is None else (block[0], block[1]),
        scale=listed["scale"],
        hadamard=listed["hadamard"],
        tiled=listed["tiled"],
        random_bytes=file.get_tensor(names["random_bytes"]) if "random_bytes" in names else None,
        expected=expected,
    )


def differences(case: Case, found: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns what differs from the golden tensors, to the bit: a line for each tensor, with the first place.

    Args:
        found: the expected tensors by name, bytes as uint8 or as an 8- or 4-bit dtype. A missing one differs.
    """
    lines = []
    for name, golden in case.expected.items():
        if name not in found:
            lines.append(f"{name} missing")
            continue
        mine = found[name].detach().cpu()
        mine = mine.contiguous().view(torch.uint8) if mine.element_size() == 1 else mine.contiguous()
        if (mine.shape, mine.dtype) != (golden.shape, golden.dtype):
            lines.append(f"{name} {mine.dtype} {list(mine.shape)}, not {golden.dtype} {list(golden.shape)}")
            continue
        bits = {1: torch.uint8, 4: torch.int32}[golden.element_size()]
        places = (mine.view(bits) != golden.view(bits)).nonzero()
        if len(places):
            at = tuple(places[0].tolist())
            lines.append(
                f"{name} at {list(at)}: {_shown(mine[at])}, not {_shown(golden[at])} ({len(places)} differ)"
            )
    return lines


def _shown(value: torch.Tensor) -> str:
    return f"0x{int(value):02x}" if value.dtype == torch.uint8 else f"{float(value)!r}"
