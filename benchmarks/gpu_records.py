"""Results of a GPU run on disk, whole after every check: <name>.json for programs, <name>.md to be read.

A result: check, group, verdict ('PASS', 'FAIL' or 'not run'), detail, seconds, source (digest of the code that gave it),
rows (what a benchmark's section measured), final (it does not apply here: asking again changes nothing).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_environment import describe
from megatron_fp8.files.atomic_io import replace_file
from megatron_fp8.plan.timing import table

VERDICTS = ("PASS", "FAIL", "not run")
NOT_MEASURED = "not measured"


class Records:
    """The results so far. ``processes``: what became of each process that ran checks."""

    def __init__(self, folder: Path, name: str, title: str, environment: Mapping[str, Any]):
        self.folder, self.name, self.title = folder, name, title
        self.environment = dict(environment)
        self.results: dict[str, dict[str, Any]] = {}
        self.processes: list[dict[str, Any]] = []

    def resume(self) -> None:
        """Take up what an earlier run left in the folder; nothing, where it left nothing.

        Raises:
            ValueError: the file there is not such a file, or its results are of another device or other versions.
        """
        path = self.folder / f"{self.name}.json"
        if not path.exists():
            return
        try:
            found = json.loads(path.read_text())
            before, results, processes = found["environment"], found["results"], found["processes"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} cannot be gone on with ({type(error).__name__}: {error}): leave out --resume"
            ) from error
        if _place(before) != _place(self.environment):
            raise ValueError(
                f"{path} is of {describe(before)}; this is {describe(self.environment)}: leave out --resume, or"
                " give another --out"
            )
        if before["versions"] != self.environment["versions"]:  # what was not installed then may be here now
            results = [{key: value for key, value in r.items() if key != "final"} for r in results]
        self.results = {result["check"]: result for result in results}
        self.processes = processes

    def add(
        self, check: str, group: str, verdict: str, detail: str, seconds: float = 0.0, **more: Any
    ) -> None:
        """A result, in place of an earlier one of this check; the files are written."""
        assert verdict in VERDICTS
        source = self.environment["source"]
        self.results[check] = {
            "check": check,
            "group": group,
            "verdict": verdict,
            "detail": detail.strip(),
            "seconds": round(seconds, 2),
            "source": source,
        } | more
        self.write()

    def add_row(self, check: str, row: dict[str, Any]) -> None:
        """A row that a check's benchmark measured, in place of an earlier one of the same cell; the files are written."""
        rows = self.results[check].setdefault("rows", [])
        rows[:] = [r for r in rows if _cell(r) != _cell(row)] + [row]
        self.write()

    def drop(self, group: str, kept: Iterable[str]) -> None:
        """Forget results of a group by other names than those kept."""
        names = set(kept)
        self.results = {n: r for n, r in self.results.items() if r["group"] != group or n in names}

    def settled(self, check: str) -> bool:
        """Whether a check need not be run again: it passed, or does not apply here."""
        result = self.results.get(check, {})
        return result.get("verdict") == "PASS" or bool(result.get("final"))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every row that was measured."""
        return [row for result in self.results.values() for row in result.get("rows", [])]

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [name for name, result in self.results.items() if result["verdict"] == "FAIL"]

    def summary(self) -> str:
        """How many of each verdict, and which failed."""
        count = ", ".join(f"{sum(r['verdict'] == v for r in self.results.values())} {v}" for v in VERDICTS)
        return count + (f": {', '.join(self.failed)} failed" if self.failed else "")

    def write(self) -> None:
        """Both files, each replaced in one step."""
        record = {
            "environment": self.environment,
            "results": list(self.results.values()),
            "processes": self.processes,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / f"{self.name}.json", json.dumps(record, indent=1) + "\n")
        replace_file(self.folder / f"{self.name}.md", self._text())

    def _text(self) -> str:
        parts = [f"# {self.title}", describe(self.environment), self.summary()]
        old = [n for n, r in self.results.items() if r["source"] != self.environment["source"]]
        if old:
            parts.append(f"Of earlier code: {', '.join(old)}.")
        if self.results:
            lines = [
                (
                    r["check"],
                    r["verdict"],
                    f"{r['seconds']:.1f}",
                    _first_line(r["detail"]).replace("|", "\\|"),
                )
                for r in self.results.values()
            ]
            parts.append(table(("check", "verdict", "seconds", "detail"), lines))
        if self.rows:
            header = ("section", "case", "contender", "median ± spread", "x BF16", "rate, or why not")
            parts.append(table(header, [row_cells(row) for row in self.rows]))
        wrong = [f"{name}: {self.results[name]['detail']}" for name in self.failed]
        parts += [f"FAIL {text}" for text in wrong]
        late: Counter[str] = Counter()
        for process in self.processes:
            late[process["group"]] += process["compiled"]
        if ahead := late.pop("variants", None):
            others = ", ".join(f"{count} in {group}" for group, count in (+late).items()) or "none later"
            parts.append(f"Kernel variants compiled: {ahead} ahead, {others}.")
        for process in self.processes:
            if power := ", ".join(f"{key} {value}" for key, value in process.get("power", {}).items()):
                parts.append(f"After {process['group']}: {power}.")
        for process in self.processes:
            if process["ended"] != "exit code 0":
                output = "\n".join(f"    {line}" for line in process["output"])
                parts.append(f"The process of {process['group']} ended with {process['ended']}:\n\n{output}")
        return "\n\n".join(parts) + "\n"


def _place(environment: Mapping[str, Any]) -> tuple[Any, ...]:
    """Device and software of which results may stand in one table."""
    versions = environment["versions"]
    return (
        *(environment.get(key) for key in ("device", "dry", "cuda")),
        versions["torch"],
        versions.get("triton"),
    )


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _cell(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["section"], row["case"], row["contender"]


def row_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A benchmark's row as a table has it."""
    median = NOT_MEASURED
    if row["median_s"] is not None:
        median = f"{row['median_s'] * 1e3:.3g} ms ± {row['spread']:.0%}"
    speedup = f"{row['speedup']:.2f}" if row.get("speedup") else ""
    return *_cell(row), median, speedup, row["rate"].replace("|", "\\|")


def selected(names: Iterable[str], only: str) -> set[str]:
    """The names that contain one of the words of ``only`` (separated by commas); all, where there is none.

    Raises:
        ValueError: a word that is in no name.
    """
    names, words = list(names), [word for word in only.split(",") if word]
    unknown = [word for word in words if not any(word in name for name in names)]
    if unknown:
        raise ValueError(
            f"no check has {', '.join(map(repr, unknown))} in its name: there are {', '.join(names)}"
        )
    return {name for name in names if not words or any(word in name for word in words)}
