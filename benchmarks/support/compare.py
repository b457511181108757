"""Byte comparison that names the first element that differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch


def to_bytes(t: torch.Tensor | np.ndarray) -> np.ndarray:
    """The elements of `t` as unsigned integers of the same width, so that NaN and -0 compare exactly."""
    if isinstance(t, torch.Tensor):
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
        t = t.detach().cpu().contiguous().view(integer).numpy()
    t = np.ascontiguousarray(t)
    return t.view(np.dtype(f"u{t.itemsize}"))


def assert_same_bytes(actual: torch.Tensor | np.ndarray, expected: torch.Tensor | np.ndarray, what: str = ""):
    """Same shape, same element width, same bits; else the message holds the first difference's coordinate."""
    a, e = to_bytes(actual), to_bytes(expected)
    assert a.dtype == e.dtype, f"{what}: elements of {a.itemsize} bytes, expected {e.itemsize}"
    assert a.shape == e.shape, f"{what}: shape {a.shape}, expected {e.shape}"
    differ = a != e
    if differ.any():
        where = tuple(int(i) for i in np.argwhere(differ)[0])
        digits = 2 * a.itemsize
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {a.size} elements differ, first at {where}: "
            f"0x{int(a[where]):0{digits}x}, expected 0x{int(e[where]):0{digits}x}"
        )


def assert_all_same_bytes(
    actual: Iterable[Any] | Mapping[str, Any], expected: Iterable[Any] | Mapping[str, Any], what: str = ""
) -> None:
    """``assert_same_bytes`` of each pair of two sequences; of two mappings, of all that `expected` has."""
    if isinstance(expected, Mapping):
        assert isinstance(actual, Mapping)
        named = {name: (actual[name], value) for name, value in expected.items()}
    else:
        named = {f"number {i}": pair for i, pair in enumerate(zip(actual, expected, strict=True))}
    for name, (mine, theirs) in named.items():
        assert_same_bytes(mine, theirs, f"{what} {name}".strip())
