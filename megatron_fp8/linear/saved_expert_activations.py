"""Saved expert activations in two tensors of sizes known before the call.

A compiler has to know how large what an operator returns will be before anybody knows how many tokens each expert gets.
So the experts' codes lie one behind the other, and so do their scales, each expert's as ``SideLayout`` has them of one
linear. Blocks along the tokens begin anew with each expert: there is room for a block more of each, and what is left at
the end is not read.

Experts that are computed as one (cpu_expert_batch.py) have their codes like this anyway. Others' are copied, a byte a
value. Rejected: a tensor for each expert. Its size would be a symbol that nothing is known of, and each graph would begin
by reading all of them on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..tensor import Operand, QuantizedSide
from .saved_tensor_layout import Layout, SideLayout

_ALIGNED = 16
"""Where kernels read codes in row order, each expert's begin at a multiple of so many elements, and so do scales."""


class SavedExperts(NamedTuple):
    """Codes of all experts, uint8, and their scales, float32 or E8M0 as uint8; both flat."""

    codes: torch.Tensor
    scales: torch.Tensor


class _Place(NamedTuple):
    """Where one expert's part of a flat tensor lies: its first element, and how."""

    first: int
    lies: Layout

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """That part: a view."""
        # as_strided counts from the beginning of memory, of which `whole` may be any part.
        return whole.as_strided(self.lies.shape, self.lies.strides, whole.storage_offset() + self.first)


class SavedExpertsLayout(NamedTuple):
    """How experts' sides lie, codes [features, tokens of the expert] each.

    Attributes:
        of: one expert's.
        features: of a token.
    """

    of: SideLayout
    features: int

    def empty(self, tokens: int, experts: int, device: torch.device) -> SavedExperts:
        """Room for so many tokens of so many experts, however they are shared out. Scales that nobody writes are 0.

        Plain arithmetic of ``tokens``, which is a symbol while a compiler traces.
        """
        height, width = self.of.granularity.rows, self.of.granularity.cols
        gaps = 0 if self.of.turned else experts * (_ALIGNED - 1)
        if self.of.granularity.is_tensor:
            scales = experts
        elif width == 0:
            scales = experts * self.features
        else:
            across = (tokens + experts * (width - 1)) // width
            scales = -(-self.features // height) * (across + (3 * experts if self.of.pads_scales else 0))
        return SavedExperts(
            torch.empty(tokens * self.features + gaps, dtype=torch.uint8, device=device),
            torch.zeros(scales + gaps, dtype=self.of.scales(1, 1).dtype, device=device),
        )

    def pack(
        self, sides: Sequence[QuantizedSide | None], tokens: Sequence[int], device: torch.device
    ) -> SavedExperts:
        """These sides; that of an expert without tokens is not looked at."""
        packed = self.empty(sum(tokens), len(tokens), device)
        for side, count, places in zip(sides, tokens, self._places(tokens), strict=True):
            if count:
                assert side is not None, "an expert's tokens have codes"
                for part, place, whole in zip(self.of.parts(side), places, packed, strict=True):
                    place.of(whole).copy_(part)
        return packed

    def unpack(self, packed: SavedExperts, tokens: Sequence[int]) -> list[Operand | None]:
        """The sides again, views; None of an expert without tokens."""
        packed = self.checked(packed, tokens)
        return [
            self.of.put_together(codes.of(packed.codes), scales.of(packed.scales)) if count else None
            for count, (codes, scales) in zip(tokens, self._places(tokens), strict=True)
        ]

    def checked(self, packed: SavedExperts, tokens: Sequence[int]) -> SavedExperts:
        """It, contiguous. ValueError unless shapes and dtypes are those that ``empty`` gives."""
        wanted = self.empty(sum(tokens), len(tokens), torch.device("meta"))
        for found, one in zip(packed, wanted, strict=True):
            if (found.shape, found.dtype) != (one.shape, one.dtype):
                raise ValueError(
                    f"{found.dtype} {list(found.shape)} came back from a hook for saved tensors, where {one.dtype}"
                    f" {list(one.shape)} was saved"
                )
        return SavedExperts(packed.codes.contiguous(), packed.scales.contiguous())

    def _places(self, tokens: Sequence[int]) -> Iterator[tuple[_Place, _Place]]:
        """Where the codes and the scales of each expert lie. One without tokens has room for scales too, as in a stack,
        but where they go by blocks."""
        first = [0, 0]
        for count in tokens:
            lies = self.of.codes(self.features, count), self.of.scales(self.features, count)
            codes, scales = (_Place(*each) for each in zip(first, lies, strict=True))
            yield codes, scales
            ends = [place.first + place.lies.extent for place in (codes, scales)]
            first = ends if self.of.turned else [-(-end // _ALIGNED) * _ALIGNED for end in ends]
