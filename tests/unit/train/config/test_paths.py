"""Paths that can be none are refused by the name of their option, before anything opens them."""

import copy
import json

import pytest

from megatron_fp8.train.config.paths import check_paths
from megatron_fp8.train.config.run_config import load, parse

TINY = "examples/configs/tiny_gpt_cpu.yaml"


@pytest.fixture(scope="module")
def run():
    return load(TINY)


@pytest.mark.parametrize(
    "option",
    [
        "run_dir", "resume", "data.tokenizer", "data.cache_dir", "checkpoint.folder", "model.fp8_size_filter",
        "data.paths",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("a\0b", "holds a NUL"),
        ("x" * 300, "File name too long"),
        ("loop/x", "symbolic links"),
        (" ", "is empty"),
    ],
)
def test_each_option_is_named(run, tmp_path, option, path, words):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    given = str(tmp_path / path) if path.startswith("loop") else path
    changed = copy.deepcopy(run)
    section, _, name = option.rpartition(".")
    setattr(
        getattr(changed, section) if section else changed, name, [given] if option == "data.paths" else given
    )
    with pytest.raises(ValueError, match=rf"{option.replace('.', '[.]')}=.*{words}"):
        check_paths(changed)


def test_a_run_with_good_paths_and_one_from_a_file_with_a_bad_one(run, tmp_path):
    check_paths(run)
    (tmp_path / "more.yaml").write_text(json.dumps({"data": {"cache_dir": "a\0b"}}))
    with pytest.raises(
        ValueError, match=r"data\.cache_dir='a\\x00b' holds a NUL character: write it without"
    ):
        parse([f"--config={TINY}", f"--config={tmp_path / 'more.yaml'}"])


def test_config_files_that_are_none(tmp_path):
    (tmp_path / "empty.yaml").touch()
    for path, words in (
        ("", "--config='' is empty"),
        (str(tmp_path / "empty.yaml"), "empty.yaml is empty: it needs keys"),
        (str(tmp_path), f"is a folder: give a YAML file, such as {tmp_path}/config.yaml"),
        ("x" * 300, "File name too long"),
    ):
        with pytest.raises(ValueError, match=words):
            load(path)


def test_a_seed_that_numpy_has_not():
    with pytest.raises(ValueError, match=r"train\.seed=9223372036854775808 must be a whole number"):
        load(TINY, f"--train.seed={2**63}")
