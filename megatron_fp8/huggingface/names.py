"""Names of export formats, without torch (formats.py has the formats)."""

from __future__ import annotations

FP8_FORMATS = ("fp8-tensor", "fp8-channel", "fp8-block")
