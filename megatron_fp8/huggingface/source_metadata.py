"""Metadata of an imported FP8 directory, in the checkpoint's manifest.

It exists if tensors and scales alone do not suffice to restore the directory's bytes in fp8-block, and only
in imported checkpoints, not in those of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..train.resume.checkpoint_compat import IMPORTED
from .architectures import Entry
from .directory import Tensors
from .formats import scale_name

FACT = IMPORTED

_FLOATS = {"float32": torch.float32, "float16": torch.float16}
_NAMED = 3  # names listed in a note


@dataclass(frozen=True)
class SourceMetadata:
    """Metadata that an export needs.

    Attributes:
        floats: checkpoint name of each tensor that was float32 or float16 -> that dtype.
        lost: FP8 weights without stored scales, by directory name -> reason.
    """

    floats: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)

    @property
    def was_in_blocks(self) -> bool:
        """Whether there is metadata, which only block-FP8 directories have."""
        return bool(self.floats or self.lost)

    def fact(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"floats": dict(self.floats), "lost": dict(self.lost)}

    def dtype(self, megatron: str) -> torch.dtype | None:
        """Original dtype of a checkpoint's tensor if it was float32 or float16."""
        return _FLOATS.get(self.floats.get(megatron, ""))

    def notes(self, listed: list[Entry]) -> list[str]:
        """Notes with the directory's names."""
        by_reason: dict[str, list[str]] = {}
        for name, why in self.lost.items():
            by_reason.setdefault(why, []).append(name)
        found = [
            f"scales of {len(names)} FP8 weight(s) are not kept ({some(names)}): {why}"
            for why, names in by_reason.items()
        ]
        floats = [entry.parts[0] for entry in listed if entry.megatron in self.floats and not entry.copy]
        if floats:
            found.append(
                f"{len(floats)} tensor(s) beside the FP8 weights are float32 or float16 ({some(floats)}):"
                " --format=fp8-block writes them as they came; training and other exports round them to the run's dtype"
            )
        return found


def some(names: Any) -> str:
    """The first few names, and the number of others."""
    listed = list(names)
    return ", ".join(listed[:_NAMED]) + (", ..." if len(listed) > _NAMED else "")


def source_metadata_of(fact: Any) -> SourceMetadata:
    """The metadata from a manifest; empty if it has none. Raises ValueError if malformed."""
    if fact is None:
        return SourceMetadata()
    parts: list[Any] = [fact.get(name) if isinstance(fact, dict) else None for name in ("floats", "lost")]
    texts = all(isinstance(part, dict) and all(isinstance(v, str) for v in part.values()) for part in parts)
    if not texts or not _FLOATS.keys() >= set(parts[0].values()):
        raise ValueError(f"its facts.{FACT} is not what an import writes: import the directory anew.")
    return SourceMetadata(*parts)


def floats_of(listed: list[Entry], tensors: Tensors) -> dict[str, str]:
    """``SourceMetadata.floats`` of a directory; empty unless it has block-FP8 weights. Excludes tensors that are always
    float32."""
    names = tensors.names()
    if not any(name.endswith("weight_scale_inv") for name in names):
        return {}
    found = {}
    for entry in listed:
        dtypes = {
            None if scale_name(part, names) else tensors.dtype(part) for part in entry.parts if part in names
        }
        if entry.copy or entry.as_stored or not dtypes <= {torch.bfloat16, *_FLOATS.values()}:
            continue
        if dtypes != {torch.bfloat16}:
            found[entry.megatron] = "float16" if dtypes == {torch.float16} else "float32"
    return found
