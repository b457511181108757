"""Names of export formats, importable without torch (see formats.py)."""

from __future__ import annotations

FP8_FORMATS = ("fp8-tensor", "fp8-channel", "fp8-block")
