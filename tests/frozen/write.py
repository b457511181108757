"""Writes what test_*.py hold the code to: `python -m tests.frozen.write [codes] [losses] [interface]` (README.md)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.support.ranks import RankPool
from tests.frozen import codes, interface, losses
from tests.support.old_checkpoints import machine

FOLDER = Path(__file__).parent


def read(name: str) -> Any:
    """What was written."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def _losses() -> dict[str, Any]:
    with RankPool() as ranks:
        return {
            "machine": machine(),
            "gpt": {name: losses.of_gpt(ranks, name) for name in losses.GPT},
            "converted": {name: losses.of_converted(name) for name in losses.CONVERTED},
        }


def _interface() -> dict[str, Any]:
    return {
        "commands": interface.commands(),
        "keys": interface.keys(),
        "documented": interface.documented(),
        "signatures": interface.signatures(),
    }


WRITTEN = {"codes": codes.digests, "losses": _losses, "interface": _interface}

if __name__ == "__main__":
    for name in sys.argv[1:] or WRITTEN:
        (FOLDER / f"{name}.json").write_text(json.dumps(WRITTEN[name](), indent=1) + "\n")
