"""Memory layout of a saved input's codes and scales, as a string. A graph can hold a string as a constant.

A compiler has to know shape, strides and dtype of everything that an operator will return, before there is a tensor. So
both backends promise a layout: the emulated one writes codes in the input's order and returns a transposed view, the
native one writes them as tensor cores read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ..numerics.rule import Granularity, Rule
from ..tensor import QuantizedSide


class Layout(NamedTuple):
    """A tensor before it exists."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def extent(self) -> int:
        """How many elements of memory it spans."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))

    def empty(self, device: torch.device) -> torch.Tensor:
        """An uninitialised one."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def lay(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself where it lies so already, else a copy that does."""
        assert tensor.shape == self.shape, (tensor.shape, self.shape)
        as_it_should = all(
            size == 1 or a == b for size, a, b in zip(self.shape, tensor.stride(), self.strides, strict=True)
        )
        return tensor if as_it_should else self.empty(tensor.device).copy_(tensor)


@dataclass(frozen=True)
class SideLayout:
    """Layouts of codes [K, tokens] and scales, for any K and number of tokens.

    Attributes:
        turned: codes are a transposed view of codes in row order, and so are scales.
    """

    granularity: Granularity
    scale: str
    fmt: torch.dtype
    turned: bool

    def __str__(self) -> str:
        name = str(self.fmt).removeprefix("torch.")
        return f"{self.granularity.rows} {self.granularity.cols} {self.scale} {name} {int(self.turned)}"

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> SideLayout:
        """From its string."""
        rows, cols, scale, fmt, turned = text.split(" ")
        return SideLayout(Granularity(int(rows), int(cols)), scale, getattr(torch, fmt), turned == "1")

    @staticmethod
    def of(rule: Rule, turned: bool) -> SideLayout:
        """That of a rule."""
        return SideLayout(rule.granularity, rule.scale, rule.fmt.dtype, turned)

    @property
    def pads_scales(self) -> bool:
        """Whether rows of scales are padded to four blocks, as torch's product reads them."""
        square = self.granularity.rows == self.granularity.cols > 0
        return square and self.scale != "e8m0" and not self.turned

    def codes(self, rows: int, tokens: int) -> Layout:
        """[rows, tokens]."""
        return Layout((rows, tokens), (1, rows) if self.turned else (tokens, 1), torch.uint8)

    def scales(self, rows: int, tokens: int) -> Layout:
        """scale_inv as it is, E8M0 as bytes."""
        height, width = self.granularity.rows, self.granularity.cols
        if self.granularity.is_tensor:
            return Layout((), (), torch.float32)
        if width == 0:
            return Layout((rows, 1), (1, 1), torch.float32)
        down, across = -(-rows // height), -(-tokens // width)
        if self.scale == "e8m0":
            return Layout((down, across), (1, down) if self.turned else (across, 1), torch.uint8)
        if self.pads_scales:
            return Layout((down, across), (-(-across // 4) * 4, 1), torch.float32)
        return Layout((down, across), (1, down), torch.float32)

    def take_apart(self, side: QuantizedSide) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scales) of a side, laid as promised; 8-bit floats as bytes, for which compilers lack no operation."""
        codes, scales = self.parts(side)
        return self.codes(*codes.shape).lay(codes), self.scales(*codes.shape).lay(scales)

    @staticmethod
    def parts(side: QuantizedSide) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scales) of a side as they lie; 8-bit floats as bytes."""
        side = side.plain()
        scales = side.scale_inv
        return side.codes.view(torch.uint8), (
            scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
        )

    def put_together(self, codes: torch.Tensor, scales: torch.Tensor) -> QuantizedSide:
        """The side again. Whether it is finite was known at run time only, and is forgotten. ValueError unless there is
        a scale for each block."""
        wanted = self.scales(*codes.shape)
        if (scales.shape, scales.dtype, codes.dtype) != (wanted.shape, wanted.dtype, torch.uint8):
            raise ValueError(
                f"codes {codes.dtype} {list(codes.shape)} and scales {scales.dtype} {list(scales.shape)} came back from"
                f" a hook for saved tensors, where torch.uint8 and {wanted.dtype} {list(wanted.shape)} were saved"
            )
        scales = scales.view(torch.float8_e8m0fnu) if self.scale == "e8m0" else scales
        return QuantizedSide(codes.view(self.fmt), scales, self.granularity, self.scale != "fp32")
