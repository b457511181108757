"""Work sharing of an import among ranks or in one process.

Each rank reads, makes and writes its own tensors and reads no others. What one rank refuses, all refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from ..files.disk import unseen
from ..state.ranks import first_to_say, from_rank, total, union
from .architectures import Entry
from .directory import Tensors, new_directory, written

T = TypeVar("T")

_PATIENCE_S = 60.0
"""How long network file systems may hide another machine's file."""
_REFUSED = "refused"


class Sharing:
    """All ranks of the process group, or without one this process. Every method is called on all of them together.

    Args:
        store: of the group's, where a rank says that it refuses; None: one process on its own.
    """

    def __init__(self, store: dist.Store | None = None) -> None:
        self._store = store
        self.rank, self.size = (0, 1) if store is None else (dist.get_rank(), dist.get_world_size())

    def each(self, work: Callable[[], T]) -> T:
        """This rank's `work()`. Raises ValueError or OSError, on all ranks, if it did on any."""
        done: list[T] = []
        failed: ValueError | OSError | None = None
        try:
            done.append(work())
        except (ValueError, OSError) as error:
            failed = error
        if (found := first_to_say(failed)) is not None:
            raise found[1] if failed is None else failed
        return done[0]

    def first(self, work: Callable[[], T]) -> T:
        """What `work()` gives on the first rank; the others only wait. Raises as `each`."""
        found = self.each(lambda: work() if self.rank == 0 else None)
        return from_rank(0, found)

    def total(self, number: int) -> int:
        """The sum over the ranks."""
        return total(number)

    def union(self, items: dict[str, str]) -> dict[str, str]:
        """The items of all ranks, in their order."""
        return union(items)

    def part(self, listed: list[Entry], tensors: Tensors) -> list[Entry]:
        """This rank's of all entries that are to be made, in their order, and about as many bytes as every other rank's.

        It is a stretch of them, as files are of a directory: so a file is read by one rank, or by a few neighbours.
        """
        made = [entry for entry in listed if not entry.copy]
        sizes = [sum(_stored_bytes(name, tensors) for name in entry.parts) for entry in made]
        all_bytes, before, mine = sum(sizes), 0, []
        for entry, size in zip(made, sizes, strict=True):
            middle = 2 * before + size  # of twice all bytes
            if middle * self.size // (2 * all_bytes) == self.rank:
                mine.append(entry)
            before += size
        return mine

    def until_one_refuses(self, work: Callable[[str], T]) -> Callable[[str], T]:
        """`work`, which also ends by ValueError after it failed on another rank: nobody goes on for hours in vain."""
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
        """`directory.new_directory` of the first rank, for all: it is there when every rank's block has ended well."""
        with ExitStack() as stack:
            folder = self.first(lambda: stack.enter_context(new_directory(path)))
            with written(path):
                yield folder
            self.first(stack.pop_all().close)

    def see(self, file: Path) -> None:
        """Raise ValueError, on all ranks, if one of them does not see what the first has written."""
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
