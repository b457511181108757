"""Overlap checks for parts of a tensor, by offset and shape.

Parts of a tensor that do not overlap, and together have as many elements, cover it.
"""

from __future__ import annotations

from collections.abc import Sequence

Box = tuple[Sequence[int], Sequence[int]]
"""Offset and shape."""


def overlap(boxes: Sequence[Box]) -> bool:
    """Whether two of the boxes share an element. All boxes have the same number of dimensions.

    Boxes are sorted along the dimension with the most distinct offsets, so that few pairs are compared.
    """
    boxes = [box for box in boxes if all(box[1])]
    if len(boxes) < 2:
        return False
    dimensions = len(boxes[0][0])
    along = max(range(dimensions), key=lambda d: len({offset[d] for offset, _ in boxes}), default=None)
    if along is None:
        return True  # two parts of a scalar
    reaching: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][along]):
        start = box[0][along]
        reaching = [other for other in reaching if other[0][along] + other[1][along] > start]
        if any(_share_element(box, other) for other in reaching):
            return True
        reaching.append(box)
    return False


def _share_element(one: Box, other: Box) -> bool:
    return all(a < b + d and b < a + c for a, c, b, d in zip(one[0], one[1], other[0], other[1], strict=True))
