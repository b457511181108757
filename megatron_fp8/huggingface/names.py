"""Names of what an export can be, apart from what they stand for, which needs torch (formats.py)."""

from __future__ import annotations

FP8_FORMATS = ("fp8-tensor", "fp8-channel", "fp8-block")
