"""Checkpoints written without ranks, a model or Megatron-Core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta

from megatron_fp8.files import checkpoint as files


class Writer(dcp.FileSystemWriter):
    """torch's, without the path that it would put into .metadata as an object."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def write_checkpoint(
    checkpoints: Path, iteration: int, tensors: dict[str, torch.Tensor], facts: dict[str, Any] | None = None
) -> Path:
    """The folder of a complete checkpoint in ``checkpoints``."""
    folder = checkpoints / files.folder_name(iteration)
    dcp.save(dict(tensors), storage_writer=Writer(folder), no_dist=True)
    manifest = files.Manifest(iteration, {"optimizer_step": iteration}, facts or {"layout": {"tensor": 1}})
    manifest.files = {path.name: files.file_record(path) for path in folder.iterdir()}
    manifest.write(folder)
    return folder
