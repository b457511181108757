"""Devices on which reading a value back waits. They use another code path, with equal results."""

from __future__ import annotations

import torch


def read_waits(device: torch.device) -> bool:
    """Whether reading a value back waits for all earlier work, as on a GPU: then no step reads one."""
    return device.type == "cuda"
