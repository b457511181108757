"""Verifies a checkpoint's files against its manifest, divided among ranks.

If rank 0 alone read terabytes, the others would wait longer than a collective may take.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from ..files.checkpoint import Manifest, check_files, check_listed
from .launch.parallel import on_every_rank, on_first_rank


def check_together(folder: Path, manifest: Manifest) -> None:
    """Raise ValueError on every rank if a checkpoint has changed since it was written. Collective."""
    on_every_rank(
        lambda: check_files(folder, manifest, share(manifest, dist.get_rank(), dist.get_world_size()))
    )
    on_first_rank(lambda: check_listed(folder, manifest))


def share(manifest: Manifest, rank: int, ranks: int) -> list[str]:
    """The files that `rank` reads; files are dealt out by size, the largest first."""
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name]["bytes"], name))
    return by_size[rank::ranks]
