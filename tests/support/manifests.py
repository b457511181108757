"""Checkpoints that were edited: manifests that say something else, with a checksum that fits or as the first version."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_fp8.files.checkpoint import file_record
from megatron_fp8.files.manifest import Manifest


def edit(checkpoint: Path, change: Callable[[dict[str, Any]], Any], *, checksum: bool = True) -> None:
    """``change`` the manifest's content in place; it gets its checksum, or is made one of the version without."""
    path = checkpoint / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    if checksum:
        made = Manifest(*(content[name] for name in ("iteration", "state", "facts", "files")))
        path.write_text(made.text())
    else:
        content.pop("sha256", None)
        path.write_text(json.dumps({**content, "version": 1}))


def relist(checkpoint: Path, name: str) -> None:
    """Put a file's present size and checksum into the manifest."""
    edit(checkpoint, lambda content: content["files"].update({name: file_record(checkpoint / name)}))
