"""Parts of a tensor that lie over each other."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from megatron_fp8.files.checkpoint_metadata import overlap


@pytest.mark.parametrize("shape", [(6,), (4, 5), (2, 3, 4)], ids=str)
def test_as_counting_each_element_says(shape):
    """Of boxes cut from a grid, some of them moved or made longer."""
    draw, seen = random.Random(3), set()
    for _ in range(400):
        cuts = [sorted({0, size, *draw.choices(range(size), k=2)}) for size in shape]
        boxes = [
            (tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs))
            for pairs in itertools.product(*(itertools.pairwise(cut) for cut in cuts))
        ]
        draw.shuffle(boxes)
        for _ in range(draw.randrange(3)):
            index = draw.randrange(len(boxes))
            offset, size = boxes[index]
            room = [whole - at for whole, at in zip(shape, offset, strict=True)]
            boxes[index] = offset, tuple(draw.randint(0, most) for most in room)
        counts = np.zeros(shape, int)
        for offset, size in boxes:
            counts[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] += 1
        assert overlap(boxes) == (counts.max() > 1), boxes
        seen.add(counts.max() > 1)
    assert seen == {False, True}


def test_parts_of_a_single_number():
    assert overlap([((), ()), ((), ())]) and not overlap([((), ())]) and not overlap([])
