"""The pages of documentation, and what makes a training that one of them shows small enough for a test."""

from __future__ import annotations

from pathlib import Path

from tests.support.command import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = [
    *("--model.tensor_model_parallel_size=1", "--model.sequence_parallel=false", "--model.num_layers=3"),
    *(
        "--model.hidden_size=64",
        "--model.ffn_hidden_size=64",
        "--model.kv_channels=16",
        "--train.seq_length=32",
    ),
    *("--train.eval_iters=0", "--data", "words.txt", "--data.split=100,0,0"),
]


def name(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(ROOT).as_posix()
