"""A run's folder without checkpoints: the refusal names where its config says that they are, and nothing is followed."""

from __future__ import annotations

import pytest

from megatron_fp8.files.checkpoint import find_checkpoint
from tests.support.written_checkpoints import write_checkpoint


def refusal(folder):
    with pytest.raises(ValueError, match="no checkpoint is in it") as error:
        find_checkpoint(folder)
    return str(error.value)


@pytest.mark.parametrize("relative", [False, True])
def test_the_folder_is_named_and_not_followed(tmp_path, monkeypatch, relative):
    """Even where it is there: whoever wrote config.yaml does not choose what is exported."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "saves", 3, {})
    folder = "saves" if relative else str(tmp_path / "saves")
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(f"checkpoint:\n  folder: {folder}\n")
    said = refusal(run)
    assert f"has checkpoint.folder={folder!r}" in said and "give that folder. Give a folder such as" in said
    assert ("counts from where that run was started" in said) == relative


@pytest.mark.parametrize(
    "content",
    ["", "{}", "checkpoint:", "checkpoint: x", "checkpoint: {folder: null}", "checkpoint: {folder: [a]}"],
)
def test_where_none_is_named_none_is_said(tmp_path, content):
    (tmp_path / "config.yaml").write_text(content)
    said = refusal(tmp_path)
    assert "config.yaml" not in said and "no checkpoint is in it. Give a folder such as RUN_DIR/" in said
    (tmp_path / "config.yaml").unlink()
    assert refusal(tmp_path) == said


def test_a_config_that_cannot_be_read_is_said(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("checkpoint: {folder: a, folder: b}")
    assert "which may say where they are, cannot be read (the key 'folder' stands twice" in refusal(run)
    (run / "config.yaml").unlink()
    (tmp_path / "secret").write_text("checkpoint: {folder: mine}")
    (run / "config.yaml").symlink_to(tmp_path / "secret")
    assert "is a link out of its folder" in refusal(run)
