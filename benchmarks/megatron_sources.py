"""Which of this package's patches, imports and overridden methods fit the sources of another Megatron-Core.

    python -m benchmarks.megatron_sources CHECKOUT            # CHECKOUT has megatron/core; nothing is fetched or run
    python -m benchmarks.megatron_sources CHECKOUT --write    # benchmarks/results/megatron_sources.*

Each name is compared with the installed Megatron-Core: is it there, has it the same parameters, the same code (without
comments and docstrings)? A patch whose name is gone ends install(); one whose code changed may do the wrong thing.
Exit codes: 0 all are the same, 1 some are not, 2 bad input.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import environment, table, write_results
from benchmarks.support.megatron_sources import Sources

PACKAGE = Path(__file__).parents[1] / "megatron_fp8"
STATES = ("same", "body", "signature", "gone")
KINDS = {
    "patch": "names that install() replaces",
    "override": "methods that a class of this package overrides",
    "import": "other names that are imported",
}


@dataclass(frozen=True)
class Finding:
    """How a name of the installed Megatron-Core stands in other sources.

    Attributes:
        kind: a key of KINDS.
        state: one of STATES: 'body' has the same parameters and other code; 'gone' is not there.
        note: parameters that left (-) and came (+), or where a definition of that name is now.
    """

    kind: str
    name: str
    state: str
    note: str = ""


def patched_names() -> list[str]:
    """The Megatron-Core names that install() replaces on a machine without GPU and Transformer Engine: most of all."""
    from megatron_fp8.mcore.patches.missing_packages import plain_functions

    with plain_functions():
        from megatron_fp8.mcore.optimizer import adam
        from megatron_fp8.mcore.patches import cpu_engine, fp8_hooks
    found = [*cpu_engine.patches(), *fp8_hooks.patches(), *adam.patches()]
    return sorted({str(patch) for patch in found if patch.target.startswith("megatron.core")})


def imported_names(files: Iterable[Path]) -> Iterator[tuple[Path, str, str]]:
    """(file, its name there, dotted name) of each name that is imported from Megatron-Core."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core"):
                for alias in node.names:
                    yield file, alias.asname or alias.name, f"{node.module}.{alias.name}"


def overridden_names(imports: Iterable[tuple[Path, str, str]]) -> Iterator[str]:
    """Methods of Megatron-Core's classes by the names that classes derived from them here define."""
    bases: dict[Path, dict[str, str]] = {}
    for file, name, path in imports:
        bases.setdefault(file, {})[name] = path
    for file, known in bases.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            for base in node.bases:
                first, _, rest = ast.unparse(base).partition(".")
                if first in known:
                    path = f"{known[first]}.{rest}" if rest else known[first]
                    yield from (f"{path}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef))


def compared(kind: str, name: str, installed: Sources, other: Sources) -> Finding | None:
    """A name's state in other sources; None if the installed ones do not have it, either."""
    before, after = installed.find(name), other.find(name)
    if before is None:
        return None if after is None else Finding(kind, name, "body", "it was not defined")
    if after is None:
        return Finding(kind, name, "gone", ", ".join(other.others(name)[:3]))
    if before.signature != after.signature:
        return Finding(kind, name, "signature", _changed(before.signature, after.signature))
    return Finding(kind, name, "same" if before.digest == after.digest else "body")


def _changed(before: tuple[str, ...], after: tuple[str, ...]) -> str:
    """'-a +b': parameters that left and came; 'in another order' if none did."""
    gone, new = (
        [name for name in one if name not in other] for one, other in ((before, after), (after, before))
    )
    return " ".join([*(f"-{name}" for name in gone), *(f"+{name}" for name in new)]) or "in another order"


def findings(installed: Sources, other: Sources) -> list[Finding]:
    """All names that this package patches, overrides or imports, each once, under the first of these."""
    imports = list(imported_names(sorted(PACKAGE.rglob("*.py"))))
    names = {
        "patch": patched_names(),
        "override": sorted(set(overridden_names(imports))),
        "import": sorted({path for _, _, path in imports}),
    }
    found: dict[str, Finding] = {}
    for kind, each in names.items():
        for name in each:
            if name not in found and (finding := compared(kind, name, installed, other)) is not None:
                found[name] = finding
    return list(found.values())


def page(found: list[Finding]) -> str:
    """Counts by kind and state, then the names that are not the same; of imports, other code says nothing."""
    counts = Counter((finding.kind, finding.state) for finding in found)
    rows = [[what, *(str(counts[kind, state]) for state in STATES)] for kind, what in KINDS.items()]
    changed = [
        [finding.kind, f"`{finding.name.removeprefix('megatron.core.')}`", finding.state, finding.note]
        for finding in sorted(
            found, key=lambda f: (list(KINDS).index(f.kind), -STATES.index(f.state), f.name)
        )
        if finding.state not in (("same", "body") if finding.kind == "import" else ("same",))
    ]
    head = ["", "the same", "other code", "other parameters", "gone"]
    return "\n\n".join([table(head, rows), table(["kind", "name in megatron.core", "state", "now"], changed)])


def main(arguments: list[str] | None = None) -> int:
    """Compares and prints; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a folder with megatron/core")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/megatron_sources.*")
    given = parser.parse_args(arguments)
    import megatron.core

    try:
        installed, other = Sources(Path(megatron.core.__path__[0]).parents[1]), Sources(given.checkout)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = findings(installed, other)
    body = page(found)
    print(f"megatron-core {other.version} in {other.root}, compared with {installed.version}\n\n{body}")
    if given.write:
        record = {
            **environment(["megatron-core"]),
            "measured": f"the sources of megatron-core {other.version}",
        }
        command = "python -m benchmarks.megatron_sources CHECKOUT --write"
        title = f"Patches of Megatron-Core {installed.version} in the sources of {other.version}"
        changed = [asdict(finding) for finding in found if finding.state != "same"]
        write_results("megatron_sources", title, command, record, body, changed)
    return int(any(finding.state != "same" for finding in found))


if __name__ == "__main__":
    raise SystemExit(main())
