"""Huge pages for weights that are read from end to end for each token.

With pages of 4 KiB a core that streams weights looks up an address every 64 cache lines, and its prefetchers stop there.
One that lies in pages of 2 MiB is read a sixth faster. Programs have to ask for them on most systems
(``/sys/kernel/mm/transparent_hugepage/enabled`` says ``madvise``).

Asked of memory that is written already, since malloc hands out memory that it had before: Linux 6.1 copies it into huge
pages at once, an older one later or never. Rejected: memory of our own, aligned to huge pages. Everything that copies,
shares or counts a weight's storage would meet it.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

import torch

_HUGEPAGE, _COLLAPSE = 14, 25  # of Linux's madvise
_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def in_huge_pages(x: torch.Tensor) -> int:
    """Ask that x's memory lie in huge pages, as far as whole ones fit into it; its numbers stay.

    Args:
        x: any CPU tensor that is written; of other devices nothing is asked.

    Returns:
        The bytes that lie in huge pages now; 0 where the system has none, forbids them, or takes its time.
    """
    size = page_size()
    if not size or not x.is_cpu:
        return 0
    begin = -(-x.data_ptr() // size) * size
    length = (x.data_ptr() + x.numel() * x.element_size() - begin) // size * size
    if length <= 0:
        return 0
    libc = ctypes.CDLL(None)
    at, bytes_ = ctypes.c_void_p(begin), ctypes.c_size_t(length)
    if libc.madvise(at, bytes_, _HUGEPAGE) != 0:
        return 0
    return length if libc.madvise(at, bytes_, _COLLAPSE) == 0 else 0


@cache
def page_size() -> int:
    """Bytes of a huge page; 0 where a process cannot have any by asking."""
    if sys.platform != "linux" or not _SIZE.exists():
        return 0
    return int(_SIZE.read_text())
