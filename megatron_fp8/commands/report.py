"""`megatron-fp8 report`: a run's report.json and how its losses went, readable."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..train.report import format_report, read_report
from .line import refuse

USAGE = """\
usage: megatron-fp8 report RUN_DIR

Prints the device, versions, parallel layout, parameters and the precision of every layer of a run, and
its losses.
"""


def main(arguments: list[str]) -> int:
    """Print the report of the run in `arguments`; returns the exit code."""
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        return 0
    if len(arguments) != 1:
        print("error: give one run folder: megatron-fp8 report RUN_DIR", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        report = read_report(folder)
        text = [format_report(report), *losses(folder if folder.is_dir() else folder.parent)]
    except KeyError as error:
        return refuse(ValueError(f"{str(folder)!r} is not a run's report or metrics: {error} is missing"))
    except (TypeError, AttributeError, IndexError) as error:  # other JSON than a run writes
        return refuse(ValueError(f"{str(folder)!r} is not a run's report or metrics ({error})"))
    except ValueError as error:
        return refuse(error)
    print("\n".join(text))
    return 0


def losses(folder: Path) -> list[str]:
    """One line about training and one about validation, if the run got that far."""
    lines = []
    steps = _records(folder / "metrics.jsonl")
    if steps:
        skipped = sum(step["skipped"] for step in steps)
        lines.append(
            f"training    {len(steps)} iterations, loss {steps[0]['lm_loss']} -> {steps[-1]['lm_loss']}, "
            f"{skipped} steps skipped"
        )
    validations = _records(folder / "validation.jsonl")
    if validations:
        last = validations[-1]
        lines.append(f"validation  loss {last['validation_loss']} after iteration {last['iteration']}")
    return lines


def _records(path: Path) -> list[dict]:
    """The objects of a .jsonl file; an unfinished last line, of a run that was killed, is left out."""
    if not path.is_file():
        return []
    complete = path.read_text(encoding="utf-8").rpartition("\n")[0]
    try:
        return [json.loads(line) for line in complete.splitlines()]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} holds a line that is no record ({error}): remove it.") from error
