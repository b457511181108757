"""What benchmarks/gpu_groups.py starts in its tests: checks that pass, fail, raise, die and hang, without torch.

Each check adds its name to the file ``ran`` in the folder $STAND_IN.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_child import serve, teller
from benchmarks.gpu_plan import NotRun

FOLDER = Path(os.environ["STAND_IN"])


class Device:
    """A device that is there and does nothing."""

    dry = False
    tell: Callable[..., None]

    def synchronize(self) -> None:
        pass

    def empty(self) -> None:
        pass


def passes(device: Device) -> str:
    return "right"


def fails(device: Device) -> str:
    assert 1 == 2, "1 is not 2"
    return ""


def raises(device: Device) -> str:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def aborts(device: Device) -> str:
    print("terminate called", flush=True)
    os.abort()


def killed(device: Device) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def hangs(device: Device) -> str:
    time.sleep(60)
    return ""


def elsewhere(device: Device) -> str:
    raise NotRun("needs another GPU")


def rows(device: Device) -> str:
    """Measures twice, and dies."""
    row = {"section": "s", "case": "c", "rate": "", "median_s": 1.0, "spread": 0.0, "speedup": 2.0}
    device.tell(row=row | {"contender": "a"})
    device.tell(row=row | {"contender": "a", "rate": "told again"})
    os._exit(4)


def lingers(device: Device) -> str:
    atexit.register(time.sleep, 60)
    return "right"


def disk(device: Device) -> str:
    """What the results on disk say while this runs."""
    found = json.loads((FOLDER / "results.json").read_text())["results"]
    return ", ".join(f"{r['check']} {r['verdict']}" for r in found)


def main() -> None:
    settings = json.loads(sys.argv[1])
    if settings["module"] == "broken":
        sys.exit("no such GPU")
    device = Device()
    device.tell = teller(int(sys.argv[2]))

    def check(name: str) -> Callable[[Any], str]:
        def run(device: Device) -> str:
            with (FOLDER / "ran").open("a") as ran:
                ran.write(f"{name} in {os.getpid()}\n")
            return str(globals()[name.split()[0]](device))

        return run

    checks = {name: check(name) for name in settings["checks"]}
    serve(checks, settings["checks"], device, device.tell, settings["each"])


if __name__ == "__main__":
    main()
