"""Notebooks that are kept with their outputs: run in a kernel of their own, cleaned, compared.

    python -m tests.support.notebook examples/fp8_lab.ipynb     # run it from top to bottom, and keep what it shows

Outputs are kept because a reader on GitHub sees plots without running anything. What they show is never typed.
"""

from __future__ import annotations

import ast
import copy
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.support.command import ROOT, environment

LONGEST_CELL = 120  # seconds


def read(path: Path) -> Any:
    """A notebook, valid by its format."""
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    return notebook


def execute(notebook: Any) -> Any:
    """A copy with the outputs of this run. nbclient's CellExecutionError if a cell fails."""
    done = copy.deepcopy(notebook)
    with tempfile.TemporaryDirectory() as folder:
        homes = dict.fromkeys(("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"), folder)
        variables = environment(**homes)
        variables.pop("MPLBACKEND", None)  # plots belong into the notebook, whatever the caller draws with
        client = NotebookClient(
            done,
            timeout=LONGEST_CELL,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        client.execute(env=variables)
    return tidy(done)


def tidy(notebook: Any) -> Any:
    """The notebook without what is its run's: the version of Python, what kernels add to cells, prints in pieces."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {key: cell.metadata[key] for key in ("jupyter", "tags") if key in cell.metadata}
        if "outputs" in cell:
            cell.outputs = _joined(cell.outputs)
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """What a cell prints arrives in pieces, which depend on how fast it does."""
    joined: list[Any] = []
    for output in outputs:
        if (
            joined
            and output.output_type == "stream" == joined[-1].output_type
            and output.name == joined[-1].name
        ):
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def said(cell: Any) -> str:
    """The text that a cell shows, prints and values."""
    return "".join(
        output.text if output.output_type == "stream" else output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
    )


def shown(cell: Any) -> list[str]:
    """The kinds of a cell's outputs: 'stdout', 'stderr', or the richest form of a value ('image/png')."""
    kinds = []
    for output in cell.outputs:
        forms = sorted(output.get("data", {}), key=lambda form: form == "text/plain")
        kinds.append(output.name if output.output_type == "stream" else [*forms, output.output_type][0])
    return kinds


def words(text: str) -> str:
    """A text without its numbers, and without the spaces that depend on how long they are."""
    return " ".join(re.sub(r"[-+]?\b\d[\d.,]*(?:e[-+]?\d+)?", "#", text).split())


def tagged(notebook: Any, kind: str) -> dict[str, Any]:
    """Number -> the code cell tagged 'KIND-NUMBER'."""
    tags = [(tag, cell) for cell in notebook.cells for tag in cell.metadata.get("tags", [])]
    return {tag.partition("-")[2]: cell for tag, cell in tags if tag.partition("-")[0] == kind}


def definition(source: str) -> str:
    """The one function that a cell defines, without the calls that follow it."""
    (function,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return "\n".join(source.splitlines()[: function.end_lineno])


def main() -> None:
    """Run the notebook named on the command line and write it back."""
    path = ROOT / sys.argv[1]
    nbformat.write(execute(read(path)), path)
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
