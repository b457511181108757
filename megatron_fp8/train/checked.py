"""Verifies a checkpoint's files against its manifest, shared among ranks.

Rank 0 alone would read terabytes while the others wait for it, longer than a collective may.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from ..files.checkpoint import Manifest, check_files, check_listed
from .launch.parallel import on_every_rank, on_first_rank


def check_together(folder: Path, manifest: Manifest) -> None:
    """ValueError, on every rank, unless a checkpoint is what was written (files.checkpoint.check_files). Collective."""
    on_every_rank(
        lambda: check_files(folder, manifest, share(manifest, dist.get_rank(), dist.get_world_size()))
    )
    on_first_rank(lambda: check_listed(folder, manifest))


def share(manifest: Manifest, rank: int, ranks: int) -> list[str]:
    """The files that one of so many ranks reads: the largest are dealt out first."""
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name]["bytes"], name))
    return by_size[rank::ranks]
