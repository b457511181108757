"""Calibration of the roofline: measured step times over estimates, by machine.

`python -m benchmarks.roofline --write` measures and writes calibration.yaml. That roofline used the machine's own
`megatron-fp8 bench` results, not a data sheet.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from ..files.strict_yaml import load_yaml


def measured() -> dict[str, Any]:
    """Content of calibration.yaml: date, machine, model, and the ratios by precision."""
    found: dict[str, Any] = load_yaml(resources.files(__package__).joinpath("calibration.yaml").read_bytes())
    return found


def sentence() -> str:
    """The calibration in one sentence."""
    found = measured()
    ratios = sorted(found["ratio"].values())
    return (
        f"a real step took {ratios[0]:.1f} to {ratios[-1]:.1f} x the roofline on the one machine where both were measured"
        f" ({found['machine']}, a CPU, {found['date']}; {found['model']}); on GPUs nobody has compared them"
    )
