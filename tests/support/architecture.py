"""The package's import order, from left to right, and the text of docs/architecture.md.

What is in one group does not import each other.
"""

from __future__ import annotations

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
    ("fp4_utils",),
    ("mcore",),
    ("train",),
    ("diagnosis",),
    ("huggingface", "report", "estimate"),
    ("serve",),
    ("study", "conformance"),
    ("commands",),
    ("__main__", "moved"),
]

PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
