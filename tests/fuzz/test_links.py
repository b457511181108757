"""Links in a checkpoint: one that leads out of it is refused; folders may be links, and go on working."""

import shutil

import pytest

from tests.support.fuzz_targets import EXPORT, FILES, NEWEST, TRAIN, fresh
from tests.support.run_in_process import done_or_refused

COMMANDS = (EXPORT, TRAIN, "inspect run --check", "inspect run")


@pytest.mark.parametrize("name", [*FILES, "latest"])
def test_a_link_out_of_a_checkpoint_is_refused(originals, place, tmp_path, name):
    """Even to the very bytes that were saved."""
    fresh(place, originals, "run", "config.yaml", "corpus.txt", "cache")
    checkpoints = place / "run" / "checkpoints"
    path = checkpoints / name if name == "latest" else checkpoints / NEWEST / name
    shutil.move(path, tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    for command in COMMANDS if name == ".metadata" else COMMANDS[2:3]:
        said = done_or_refused(*command.split()).refusal
        assert f"{name}' is a link out of its folder, to '{tmp_path / 'outside'}'" in said, command
    assert not (place / "out").exists()


@pytest.mark.parametrize("linked", ["run/checkpoints", f"run/checkpoints/{NEWEST}", "a file"])
def test_links_to_folders_and_inside_of_one_are_followed(originals, place, tmp_path, linked):
    """As where checkpoints lie on another disk."""
    fresh(place, originals, "run", "config.yaml", "corpus.txt", "cache")
    path, there = place / linked, tmp_path / "disk"
    if linked == "a file":
        path = place / "run" / "checkpoints" / NEWEST / ".metadata"
        there = path.with_name("kept")
    shutil.move(path, there)
    path.symlink_to(there.name if linked == "a file" else there)
    for command in COMMANDS[:3]:
        assert done_or_refused(*command.split()).code == 0, command
