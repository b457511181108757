"""The command line that the GPU check and the GPU benchmark share: options, what is left to do, and the exit code."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_environment import EXIT_NO_GPU, ROOT, describe, environment, missing_packages
from benchmarks.gpu_groups import Run
from benchmarks.gpu_plan import Group
from benchmarks.gpu_records import Records, selected

EXIT_FAILED, EXIT_USAGE = 1, 2
DRY_FOLDER = ROOT / "build" / "gpu-dry-run"
OPENING_SECONDS = 180


def main(name: str, title: str, text: str, groups: Sequence[Group], arguments: list[str] | None) -> int:
    """Run groups, print and keep the results; 1 if a check failed or none passed, 2 for bad input, 3 without a GPU."""
    began = time.monotonic()
    wanted = parser(text).parse_args(arguments)
    folder = wanted.out or (DRY_FOLDER if wanted.dry_run else ROOT / "benchmarks" / "results")
    try:
        if not 0 < wanted.minutes < 1e6 or wanted.repetitions < 1:
            raise ValueError(
                f"--minutes {wanted.minutes:g} --repetitions {wanted.repetitions}: both must be above 0"
            )
        names = selected([check for group in groups for check in group.checks], wanted.only)
        records = Records(folder, name, title, _environment(wanted.dry_run))
        if wanted.resume:
            records.resume()
        records.write()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    print(describe(records.environment), flush=True)
    _say_missing()
    run = Run(records, 60 * wanted.minutes, wanted.dry_run, wanted.repetitions, began=began)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    ended = ""
    try:
        run.groups(to_do(groups, names, records))
        records.write()
    except KeyboardInterrupt:
        ended = "interrupted"
    except OSError as error:  # the disk is full, or no process can be started
        ended = f"error: {error}"
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"{records.summary()}\nresults: {records.folder / name}.json, .md and .log")
    unsettled = [check for check in records.results if not records.settled(check)]
    if unsettled:
        print(f"--resume goes on with the {len(unsettled)} that did not pass: {', '.join(unsettled)}")
    if ended:
        print(ended, file=sys.stderr)
        return EXIT_FAILED
    passed = any(result["verdict"] == "PASS" for result in records.results.values())
    return EXIT_FAILED if records.failed or not passed else 0


def parser(text: str) -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=9.0, help="of the whole run (default %(default)g)")
    made.add_argument("--only", default="", help="checks with one of these words in their name, by commas")
    made.add_argument(
        "--resume",
        action="store_true",
        help="keep what passed before, and go on: first what was not run, then what failed (else all anew)",
    )
    made.add_argument("--out", type=Path, help="folder of the results (default: benchmarks/results)")
    made.add_argument("--dry-run", action="store_true", help="on the CPU, small, with the emulated backend")
    made.add_argument("--repetitions", type=int, default=20, help="of timings (default %(default)s)")
    return made


def to_do(groups: Sequence[Group], names: set[str], records: Records) -> list[tuple[Group, tuple[str, ...]]]:
    """Groups in order with what is to be run of each; failures of an earlier run after what it did not come to."""
    left = {
        group: [check for check in group.checks if check in names and not records.settled(check)]
        for group in groups
    }
    again = set(records.failed)
    rounds = (
        (group, tuple(check for check in checks if (check in again) == failed))
        for failed in (False, True)
        for group, checks in left.items()
    )
    return [(group, checks) for group, checks in rounds if checks]


def _environment(dry: bool) -> dict[str, Any]:
    """Of a GPU it is asked in a process of its own; SystemExit(3) with the reason where there is none."""
    if dry:
        return environment(True)
    command = [sys.executable, "-m", "benchmarks.gpu_environment"]
    try:
        run = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=OPENING_SECONDS, check=True
        )
        return dict(json.loads(run.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        reason = f"error: no GPU to run on: it does not answer within {OPENING_SECONDS} s"
    except subprocess.CalledProcessError as ended:
        lines = ended.stderr.strip().splitlines() or [
            f"error: no GPU to run on: exit code {ended.returncode}"
        ]
        reason = lines[-1]
    print(reason, file=sys.stderr)
    raise SystemExit(EXIT_NO_GPU)


def _say_missing() -> None:
    missing = missing_packages()
    if missing:
        print("missing here (make gpu-wheels, on a machine with network, downloads what can be carried):")
        for _, distribution, purpose in missing:
            print(f"  {distribution:<30} {purpose}")
