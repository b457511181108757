"""Random streams of stochastic rounding: one for each backward of a site."""

from __future__ import annotations

import zlib

from ..backends.base import Region
from ..numerics.cast import RandomKey
from ..state.fp8_state import Fp8State


class GradientStream:
    """Names the random stream of each cast of a site's grad_output.

    Args:
        name: the site's.
        state: of the model; its iteration is part of the name, so that a resumed run draws what it would have drawn.
        stochastic: whether the bits are used at all; nobody need ask for a region where they are not.
        seed: of the run.
        rank: the data-parallel rank: ranks see other tokens, so they draw other bits.
    """

    def __init__(self, name: str, state: Fp8State, *, stochastic: bool, seed: int, rank: int):
        self._name, self._state, self.stochastic = name, state, stochastic
        self._seed, self._rank = seed, rank
        self._iteration, self._backwards = -1, 0  # backward passes of that iteration, so far

    def next_region(self, row_offset: int, col_offset: int, total_cols: int) -> Region:
        """Place and stream of the next backward's grad_output, a part of a matrix with ``total_cols`` columns.

        RuntimeError: a CUDA graph is captured, which would draw the same bits at each replay.
        """
        if self._state.capturing and self.stochastic:
            raise RuntimeError(
                f"{self._name} rounds gradients stochastically, by bits that the host names in each iteration: a CUDA"
                " graph would repeat them. Switch stochastic rounding off, or train without the graph"
            )
        iteration = self._state.iteration
        self._backwards = self._backwards + 1 if iteration == self._iteration else 0
        self._iteration = iteration
        stream = (self._rank << 16) + self._backwards
        key = RandomKey(self._seed, zlib.crc32(self._name.encode()), iteration, stream)
        return Region(key, row_offset, col_offset, total_cols)
