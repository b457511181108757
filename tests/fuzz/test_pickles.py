"""Pickles in a checkpoint, made by a stranger: nothing of them is called or changed that is not the format's."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8.files.checkpoint import read_metadata
from tests.support.draws import draws
from tests.support.fuzz_targets import EXPORT, FIXTURES, NEWEST, TRAIN, fresh
from tests.support.manifests import relist
from tests.support.pickles import of_the_process, programs
from tests.support.process_monitor import watched
from tests.support.run_in_process import done_or_refused

COMMANDS = (EXPORT, TRAIN, "inspect run --check")


def folder_of(place: Path) -> Path:
    return place / "run" / "checkpoints" / NEWEST


@pytest.fixture(scope="module")
def whole(originals) -> Any:
    """What a checkpoint's metadata says."""
    return read_metadata(folder_of(originals))


@draws(60, suppress_health_check=[FIXTURES])
@given(programs(), st.booleans())
def test_opcodes_change_and_call_nothing(whole, tmp_path, program, ends):
    """With nothing behind them, or a whole metadata."""
    before = pickle.dumps(whole, protocol=2)  # which notes at classes, once, that they have no slots
    unchanged = of_the_process()
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + program + (b"N." if ends else before[2:]))
    with watched() as seen:
        try:
            read_metadata(tmp_path)
        except ValueError as error:
            assert len(str(error).splitlines()) == 1, program
    assert not seen and of_the_process() == unchanged
    assert pickle.dumps(whole, protocol=2) == before


@draws(3, often=2, suppress_health_check=[FIXTURES])
@given(programs(), st.sampled_from(COMMANDS))
def test_commands_run_no_opcodes(originals, place, program, command):
    fresh(place, originals, "run", "config.yaml", "corpus.txt", "cache")
    path = folder_of(place) / ".metadata"
    path.write_bytes(b"\x80\x02" + program + path.read_bytes()[2:])
    relist(path.parent, path.name)
    done_or_refused(*command.split())


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "common.pt"])
def test_a_bomb_does_not_go_off(originals, place, tmp_path, name):
    """In each file that torch's or Megatron-Core's own loaders unpickle, under a manifest that agrees."""
    fresh(place, originals, "run", "config.yaml", "corpus.txt", "cache")
    path, mark = folder_of(place) / name, tmp_path / "mark"
    if name == ".metadata":
        path.write_bytes(pickle.dumps(Bomb(mark)))
    else:
        torch.save(Bomb(mark), path)
    relist(path.parent, path.name)
    for command in COMMANDS:
        done_or_refused(*command.split())
    assert not mark.exists()
    torch.load(path, weights_only=False) if name != ".metadata" else pickle.loads(path.read_bytes())
    assert mark.exists()  # it was one
