"""Work sharing of an import among ranks or in one process.

Each rank reads, makes and writes its own tensors only. If one rank fails, all ranks fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from ..files.atomic_io import unseen
from ..state.collectives import first_rank_with, from_rank, total, union
from .architectures import Entry
from .directory import Tensors, new_directory, written

T = TypeVar("T")

_PATIENCE_S = 60.0
"""How long network file systems may hide another machine's file."""
_REFUSED = "refused"


class Sharing:
    """All ranks of the process group, or this process without one. Every method is collective.

    Args:
        store: the group's, used to signal failure; None: a single process.
    """

    def __init__(self, store: dist.Store | None = None) -> None:
        self._store = store
        self.rank, self.size = (0, 1) if store is None else (dist.get_rank(), dist.get_world_size())

    def each(self, work: Callable[[], T]) -> T:
        """Result of `work()` on this rank. Raises ValueError or OSError on all ranks if any rank failed."""
        done: list[T] = []
        failed: ValueError | OSError | None = None
        try:
            done.append(work())
        except (ValueError, OSError) as error:
            failed = error
        if (found := first_rank_with(failed)) is not None:
            raise found[1] if failed is None else failed
        return done[0]

    def first(self, work: Callable[[], T]) -> T:
        """Result of `work()` on the first rank; other ranks wait. Raises as `each`."""
        found = self.each(lambda: work() if self.rank == 0 else None)
        return from_rank(0, found)

    def total(self, number: int) -> int:
        """The sum over the ranks."""
        return total(number)

    def union(self, items: dict[str, str]) -> dict[str, str]:
        """The items of all ranks, in their order."""
        return union(items)

    def part(self, listed: list[Entry], tensors: Tensors) -> list[Entry]:
        """This rank's entries to make, in order, with about the same number of bytes on every rank.

        They are consecutive, as in the directory's files, so each file is read by one rank or a few
        neighbours.
        """
        made = [entry for entry in listed if not entry.copy]
        sizes = [sum(_stored_bytes(name, tensors) for name in entry.parts) for entry in made]
        all_bytes, before, mine = sum(sizes), 0, []
        for entry, size in zip(made, sizes, strict=True):
            middle = 2 * before + size  # position of the middle, in half bytes
            if middle * self.size // (2 * all_bytes) == self.rank:
                mine.append(entry)
            before += size
        return mine

    def until_one_refuses(self, work: Callable[[str], T]) -> Callable[[str], T]:
        """Wraps `work` so that it raises ValueError after a failure on another rank, which avoids hours of wasted
        work."""
        store = self._store
        if store is None:
            return work

        def watched(name: str) -> T:
            if store.check([_REFUSED]):
                raise ValueError(store.get(_REFUSED).decode())
            try:
                return work(name)
            except (ValueError, OSError) as error:
                store.compare_set(_REFUSED, "", str(error))
                raise

        return watched

    @contextmanager
    def new_directory(self, path: Path) -> Iterator[Path]:
        """`directory.new_directory` on the first rank, for all: it becomes visible when every rank's block has
        succeeded."""
        with ExitStack() as stack:
            folder = self.first(lambda: stack.enter_context(new_directory(path)))
            with written(path):
                yield folder
            self.first(stack.pop_all().close)

    def see(self, file: Path) -> None:
        """Raises ValueError on all ranks if one of them does not see the first rank's file."""
        size = self.first(lambda: file.stat().st_size)

        def look() -> None:
            if unseen(file.parent, {file.name: size}, _PATIENCE_S):
                raise ValueError(
                    f"rank {self.rank} does not see {str(file.parent)!r}, which rank 0 has made: give a RUN_DIR on a file"
                    " system that all nodes have under the same path."
                )

        self.each(look)


def _stored_bytes(name: str, tensors: Tensors) -> int:
    dtype = tensors.dtype(name)
    return prod(tensors.shape(name)) * (dtype.itemsize if isinstance(dtype, torch.dtype) else 1)
