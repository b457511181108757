"""Which commit of the repository gave a result."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def commit(root: Path = ROOT) -> str | None:
    """The short hash of a checkout's commit, with '-dirty' where tracked files differ from it.

    None without git, or where ``root`` is no checkout; that of a repository around it says nothing of it.
    """
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
