"""A checkpoint that is to be exported: its tensors by name, and what its run's config says about them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint_files import check_files, find_checkpoint, read_manifest, read_metadata, read_tensor

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_NOT_MODEL = ("optimizer.", "rng.")


@dataclass
class Source:
    """A checkpoint that is to be exported.

    Attributes:
        section: the model section of its run.
        run: all sections that are known.
        metadata: torch_dist's.
    """

    folder: Path
    section: dict[str, Any]
    run: dict[str, Any]
    metadata: Any

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return _DTYPES[self.section.get("params_dtype") or "bfloat16"]

    def weights(self) -> set[str]:
        """Names of the model's tensors."""
        return {
            name
            for name in self.metadata.state_dict_metadata
            if not name.startswith(_NOT_MODEL) and ".fp8_state." not in name
        }

    def shape(self, name: str) -> list[int]:
        """Of a tensor of the checkpoint."""
        return list(self.metadata.state_dict_metadata[name].size)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, whole, in the model's dtype."""
        return read_tensor(self.folder, self.metadata, name).to(self.dtype)


def open_source(path: Path, run: dict[str, Any] | None = None) -> Source:
    """The checkpoint that a path means, every file of it checked.

    Args:
        run: the sections of its run, where the checkpoint itself does not say (it was saved from Python).

    Raises ValueError: it is no checkpoint, damaged, or says nothing about its model.
    """
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    run = run or manifest.facts.get("run")
    if not run or not run.get("model"):
        raise ValueError(
            f"{str(folder)!r} does not say what model it is of: give its run's config with --config=FILE."
        )
    precision = manifest.facts.get("precision", {})  # two names for one thing are resolved there
    settled = {name: precision[name] for name in ("params_dtype", "fp8", "fp8_recipe") if name in precision}
    return Source(folder, {**run["model"], **settled}, run, read_metadata(folder))
