"""Which rank's end was the others'."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fp8.train.launch.launcher import _ended_with_parent, _first_failure


def failed(*ends: tuple[int, int]) -> Any:
    """Rank -> its end, from (exit code, second)."""
    return {rank: SimpleNamespace(exitcode=code, timestamp=at) for rank, (code, at) in enumerate(ends)}


@pytest.mark.parametrize(
    ("ends", "root"),
    [
        ([(1, 5), (1, 4)], 1),  # the first
        ([(1, 5), (-9, 5)], 1),  # a rank that lost its peer fails in the same second
        ([(-15, 5), (1, 5)], 1),  # the agent ends those that are left
        ([(-9, 4), (2, 5)], 1),  # bad input, which is bad for all
    ],
)
def test_the_rank_whose_end_was_the_others(ends, root):
    assert _first_failure(failed(*ends)) == root


def test_a_setpriv_that_knows_no_parents_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """util-linux before 2.33, as on Enterprise Linux 8, and BusyBox."""
    (tmp_path / "setpriv").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "setpriv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert _ended_with_parent(["python", "train.py"]) == ["python", "train.py"]
