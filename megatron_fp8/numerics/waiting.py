"""Where looking at a value costs a wait: results do not depend on it, only which of two equal ways is taken."""

from __future__ import annotations

import torch


def looking_waits(device: torch.device) -> bool:
    """Whether to look at a value there is to wait for all work before it, so that nobody looks inside a step: a GPU."""
    return device.type == "cuda"
