"""The package's import order, from left to right, and the walks of docs/architecture.md.

What is in one group does not import each other.
"""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megatron_fp8"

STREAM: list[tuple[str, ...]] = [
    ("files",),
    ("numerics",),
    ("recipe",),
    ("kernels",),
    ("tensor",),
    ("backends",),
    ("state",),
    ("quantizer",),
    ("plan", "params"),
    ("linear",),
    ("telemetry",),
    ("nn",),
    ("inference", "integrations"),
    ("fp8_utils",),
    ("mcore",),
    ("train",),
    ("huggingface", "report", "estimate"),
    ("study",),
    ("commands",),
    ("__main__", "moved"),
]

PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")


def walk(title: str) -> list[str]:
    """The file of each stop of a walk, by the beginning of its title."""
    (section,) = re.findall(rf"^### {re.escape(title)}.*?(?=^##)", PAGE, re.M | re.S)
    return re.findall(r"^\| `([\w/]+\.py)`", section, re.M)
