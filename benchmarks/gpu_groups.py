"""Runs groups of GPU checks, each in a process of its own with a time box, within a budget; results are kept at once.

Who runs this never opens the GPU. A check whose process dies has failed, and so has one that is not done in its own time;
the group's other checks get another process. What was not run is named, with the reason.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_environment import ROOT, power_state
from benchmarks.gpu_plan import Group, obstacle
from benchmarks.gpu_process import Process
from benchmarks.gpu_records import Records, row_cells

CACHE = ROOT / "build" / "gpu-cache"


@dataclass
class Run:
    """A run that may take ``seconds``. With less than ``least`` of them left nothing more is started.

    start: seconds for a process to import torch and open the GPU; stop: to end. command: of a process, before its
    settings and the descriptor that it tells events to.
    """

    records: Records
    seconds: float
    dry: bool = False
    repetitions: int = 20
    start: float = 120.0
    stop: float = 20.0
    least: float = 5.0
    command: Sequence[str] = (sys.executable, "-m", "benchmarks.gpu_child")
    began: float = field(default_factory=time.monotonic)

    def groups(self, todo: Sequence[tuple[Group, Sequence[str]]]) -> None:
        """Run checks of groups by their names, in this order."""
        for group, names in todo:
            self.records.drop(group.name, group.checks)
            self._not_run(group, names, "not reached")
        for group, names in todo:
            self._group(group, names)

    def _group(self, group: Group, names: Sequence[str]) -> None:
        """In as many processes as it takes."""
        ends = min(time.monotonic() + group.seconds, self.began + self.seconds)
        reason = obstacle(group)
        while names and reason is None:
            if ends - time.monotonic() < self.least:
                reason = self._over(group)
            else:
                names, reason = self._process(group, names, ends)
        if names:
            self._not_run(group, names, reason or "")
            for name in names:
                self._say(name)

    def _process(self, group: Group, names: Sequence[str], ends: float) -> tuple[Sequence[str], str | None]:
        """One process: (the checks that it did not come to, why no other process should take them up)."""
        settings = {
            "module": group.module,
            "checks": list(names),
            "megatron": group.megatron,
            "each": group.each,
            "dry": self.dry,
            "repetitions": self.repetitions,
            "peaks": {row["contender"]: row["peak"] for row in self.records.rows if "peak" in row},
        }
        left, current, began = list(names), "", time.monotonic()
        cached = kernels()
        since, box = began, self.start
        log = self.records.folder / f"{self.records.name}.log"
        with Process([*self.command, json.dumps(settings)], log, environment()) as process:
            process.until = min(since + box, ends)
            for event in process.events():
                if "row" in event:
                    self.records.add_row(current, event["row"])
                    print("   ", *row_cells(event["row"]), flush=True)
                    continue
                if "start" in event:
                    current, box = event["start"], group.each
                    self.records.add(current, group.name, "not run", "the run was ended while it ran")
                else:
                    self._result(group, event["result"])
                    if event["result"]["check"] != current:
                        continue
                    left.remove(current)
                    current, box = "", self.start if left else self.stop
                since = time.monotonic()
                process.until = min(since + box, ends)
            late = process.late
            ended, output = process.end(), process.output()
        record = {"group": group.name, "ended": ended, "seconds": round(time.monotonic() - began, 2)}
        record["compiled"] = kernels() - cached
        if group.name.startswith("bench") and not self.dry:
            record["power"] = power_state()
        self.records.processes.append(record | ({} if ended == "exit code 0" else {"output": output}))
        self.records.write()
        over = self._over(group) if late and time.monotonic() >= ends else None
        why = f"no end within {box:g} s" if late else f"its process ended with {ended}"
        if current:
            left.remove(current)
            verdict, detail = ("not run", over) if over else ("FAIL", "\n".join([why, *output]))
            rows = self.records.results[current].get("rows", [])
            self.records.add(current, group.name, verdict, detail, time.monotonic() - since, rows=rows)
            self._say(current)
        elif len(left) == len(names):
            return left, over or f"{why} before it began: {output[-1] if output else 'it said nothing'}"
        return left, None

    def _over(self, group: Group) -> str:
        if self.began + self.seconds - time.monotonic() < self.least:
            return f"the run's {self.seconds / 60:.3g} minutes were over"
        return f"the {group.seconds:g} s of its group were over"

    def _not_run(self, group: Group, names: Sequence[str], reason: str) -> None:
        """A failure of an earlier run stays what is known of a check."""
        for name in names:
            if self.records.results.get(name, {}).get("verdict") != "FAIL":
                self.records.add(name, group.name, "not run", reason)

    def _result(self, group: Group, result: Mapping[str, Any]) -> None:
        rows = self.records.results.get(result["check"], {}).get("rows")
        more = {"rows": rows} if rows else {}
        if result.get("final"):
            more["final"] = True
        self.records.add(
            result["check"], group.name, result["verdict"], result["detail"], result["seconds"], **more
        )
        self._say(result["check"])

    def _say(self, name: str) -> None:
        result = self.records.results[name]
        first, *rest = result["detail"].splitlines() or [""]
        print(f"{result['verdict']:<8} {name:<26} {result['seconds']:6.1f} s  {first}", flush=True)
        for line in rest if result["verdict"] == "FAIL" else []:
            print(f"{'':<46}{line}")


def environment() -> dict[str, str]:
    """The environment of every process: caches of compiled kernels that the next ones find."""
    caches = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    made = {name: str(CACHE / folder) for name, folder in caches.items()}
    return {"PYTHONUNBUFFERED": "1"} | made | os.environ


def kernels() -> int:
    """How many kernels of this package are compiled in the cache (Inductor's begin with triton_)."""
    folder = Path(environment()["TRITON_CACHE_DIR"])
    return sum(not path.name.startswith("triton_") for path in folder.glob("*/*.cubin"))
