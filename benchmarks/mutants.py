"""How many small faults the unit tests catch: `python -m benchmarks.mutants --write [--count 60] [--seed 0]`

A mutant is one change of one line of the package: a comparison, an operator, a constant, a condition or a return value.
Lines are drawn evenly over the package; of each the unit tests of its room run, until one fails. Work on a clone: files
are changed in place and put back. What was drawn and what came of it goes to tests/frozen/mutants.json.

`--again` takes the mutants of that file instead, each where its line is now.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_fp8"
RESULT = ROOT / "tests" / "frozen" / "mutants.json"
LIMIT_S = 900

_COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_OPERATED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+"}


def changes(tree: ast.Module, source: str) -> Iterator[tuple[ast.expr, str]]:
    """Each expression that can be changed, and what it becomes. Strings, annotations and asserts stay."""
    left_out = {
        inner
        for node in ast.walk(tree)
        for part in (
            [node.annotation]
            if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation
            else [node.returns]
            if isinstance(node, ast.FunctionDef) and node.returns
            else [node]
            if isinstance(node, ast.Assert)
            else []
        )
        for inner in ast.walk(part)
    }

    lines = [line.encode() for line in source.splitlines()]

    def text(node: ast.expr) -> str:
        return lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()

    for node in ast.walk(tree):
        if node in left_out or getattr(node, "lineno", 0) != getattr(node, "end_lineno", 0):
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            operator = _COMPARED[type(node.ops[0])]
            yield node, f"{text(node.left)} {operator} {text(node.comparators[0])}"
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATED:
            yield node, f"{text(node.left)} {_OPERATED[type(node.op)]} {text(node.right)}"
        elif isinstance(node, ast.BoolOp):
            joined = " or " if isinstance(node.op, ast.And) else " and "
            yield node, joined.join(f"({text(value)})" for value in node.values)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, f"({text(node.operand)})"
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, repr(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield node, repr(node.value + 1)
        elif isinstance(node, ast.IfExp):
            yield node, f"{text(node.orelse)} if {text(node.test)} else {text(node.body)}"


def draw(count: int, seed: int) -> list[dict[str, str | int]]:
    """As many mutants, no two in one function's line."""
    found: dict[tuple[str, int], dict[str, str | int]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        lines = source.splitlines()
        for node, becomes in changes(ast.parse(source), source):
            line = lines[node.lineno - 1].encode()
            after = (line[: node.col_offset] + becomes.encode() + line[node.end_col_offset :]).decode()
            file = str(path.relative_to(ROOT))
            found.setdefault(
                (file, node.lineno),
                {"file": file, "line": node.lineno, "before": line.decode(), "after": after},
            )
    return random.Random(seed).sample([found[key] for key in sorted(found)], count)


def recorded() -> list[dict[str, str | int]]:
    """The file's mutants without their outcomes, at the nearest line that reads as when they were drawn."""
    mutants = json.loads(RESULT.read_text())["mutants"]
    for mutant in mutants:
        del mutant["outcome"]
        drawn = mutant["line"]
        same = [
            number
            for number, line in enumerate((ROOT / mutant["file"]).read_text().splitlines(), 1)
            if line == mutant["before"]
        ]
        if not same:
            raise SystemExit(f"error: {mutant['file']} has no line {mutant['before'].strip()!r} any more")
        mutant["line"] = min(same, key=lambda number: abs(number - drawn))
    return mutants


def tests_of(file: str) -> list[str]:
    """Unit tests of the file's room, its own first."""
    room = Path("tests/unit") / Path(file).relative_to("megatron_fp8").parent
    while not list((ROOT / room).glob("test_*.py")):
        room = room.parent
    found = sorted(str(path.relative_to(ROOT)) for path in (ROOT / room).glob("test_*.py"))
    return sorted(found, key=lambda name: Path(file).stem not in name)


def outcome(mutant: dict[str, str | int]) -> str:
    """'caught', 'caught: no end', or 'missed'."""
    path = ROOT / str(mutant["file"])
    source = path.read_text()
    lines = source.splitlines(keepends=True)
    place = int(mutant["line"]) - 1
    lines[place] = lines[place].replace(str(mutant["before"]), str(mutant["after"]))
    path.write_text("".join(lines))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *tests_of(str(mutant["file"])),
    ]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "caught: no end"
    finally:
        path.write_text(source)
    return "missed" if done.returncode == 0 else "caught"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60, help="how many mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="keep the outcomes")
    parser.add_argument("--again", action="store_true", help="those of tests/frozen/mutants.json once more")
    chosen = parser.parse_args(arguments)
    mutants = recorded() if chosen.again else draw(chosen.count, chosen.seed)
    for number, mutant in enumerate(mutants, 1):
        begun = time.monotonic()
        mutant["outcome"] = outcome(mutant)
        took = f"{time.monotonic() - begun:.0f} s"
        print(
            f"{number}/{len(mutants)} {mutant['outcome']} ({took}) {mutant['file']}:{mutant['line']}: {mutant['after']}"
        )
        sys.stdout.flush()
        if chosen.write:
            caught = sum(str(one.get("outcome", "")).startswith("caught") for one in mutants)
            kept = {"seed": chosen.seed, "tried": number, "caught": caught, "mutants": mutants[:number]}
            RESULT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
