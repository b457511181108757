"""One process of a GPU run: it runs checks in turn and tells each event at once, a line of JSON, to who started it.

    python -m benchmarks.gpu_child '{"module": ..., "checks": [...], ...}' FILE_DESCRIPTOR

Events: {"start": check}; {"row": a benchmark's row}; {"result": {"check", "verdict", "detail", "seconds", "final"}}.
After a check that raised anything but an AssertionError on a GPU the process ends, and another goes on: what a CUDA error
leaves behind fails whatever comes next.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from benchmarks.gpu_plan import NotRun

Check = Callable[[Any], str]
Tell = Callable[..., None]


def serve(checks: Mapping[str, Check], names: Sequence[str], machine: Any, tell: Tell, each: float) -> None:
    """Run the checks by these names on a machine, each within ``each`` seconds.

    Shortly before those are over the stacks of all threads are written to standard error: whoever ends a check from
    outside finds there what it waited for.
    """
    faulthandler.enable()
    for name in names:
        tell(start=name)
        start = time.monotonic()
        machine.start, machine.deadline = start, each
        faulthandler.dump_traceback_later(max(0.5 * each, each - 3))
        verdict, detail, raised = judged(lambda name=name: checks[name](machine), machine)  # type: ignore[misc]
        faulthandler.cancel_dump_traceback_later()
        seconds, final = time.monotonic() - start, verdict == "not run"
        tell(result={"check": name, "verdict": verdict, "detail": detail, "seconds": seconds, "final": final})
        if raised and not machine.dry:
            return
        machine.empty()


def judged(check: Callable[[], str], machine: Any) -> tuple[str, str, bool]:
    """(verdict, detail, whether it raised what no check raises by itself). What the device still does counts as its."""
    try:
        detail = check()
        machine.synchronize()
        return "PASS", detail, False
    except NotRun as reason:
        return "not run", str(reason), False
    except AssertionError as error:
        return "FAIL", str(error) or traceback.format_exc(limit=-1), False
    except Exception as error:
        traceback.print_exc()
        return "FAIL", f"{type(error).__name__}: {error}", True


def teller(descriptor: int) -> Tell:
    """Writes events to a descriptor, each at once."""

    def tell(**event: Any) -> None:
        with os.fdopen(os.dup(descriptor), "w") as stream:
            stream.write(json.dumps(event) + "\n")

    return tell


def main() -> int:
    """Serve what the arguments say."""
    settings, descriptor = json.loads(sys.argv[1]), int(sys.argv[2])

    tell = teller(descriptor)
    from benchmarks.gpu_common import open_machine

    machine = open_machine(settings["dry"])
    machine.tell, machine.peaks, machine.repetitions = tell, settings["peaks"], settings["repetitions"]
    checks = importlib.import_module(settings["module"]).checks()
    with _megatron() if settings["megatron"] else nullcontext():
        serve(checks, settings["checks"], machine, tell, settings["each"])
    return 0


def _megatron() -> AbstractContextManager[None]:
    import torch

    from benchmarks.one_rank import one_rank

    return one_rank("nccl" if torch.cuda.is_available() else "gloo")


if __name__ == "__main__":
    raise SystemExit(main())
