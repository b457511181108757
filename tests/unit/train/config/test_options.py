"""Files and options are converted to the fields' types; estimate and train read the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron_fp8.estimate import config_reader as estimate_settings
from megatron_fp8.train.config import run_config
from megatron_fp8.train.config.options import convert
from megatron_fp8.train.config.run_config import load

AUTO = int | Literal["auto"]


@pytest.mark.parametrize(
    ("value", "kind", "found"),
    [
        ("3", int, 3),
        ("yes", bool, True),
        ("1e-4", float, 1e-4),
        (100, float, 100.0),
        ("123", str, "123"),
        ("null", str | None, None),
        ("123", str | None, "123"),
        ("true", bool | str, True),
        ("auto", AUTO, "auto"),
        ("[1, null]", list[int | None], [1, None]),
        ("[a]", str | list[str], ["a"]),
        ([1, 2], tuple[int, int], (1, 2)),
        ("{'*': bf16}", dict[str, str], {"*": "bf16"}),
    ],
)
def test_a_value_becomes_the_fields_type(value: Any, kind: Any, found: Any) -> None:
    converted = convert(value, kind)
    assert repr(converted) == repr(found)
    assert convert(converted, kind) == found, "what is written back is read alike"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("1e3", int), (True, int), (1.0, int), ("1", bool), (1, bool), ("", int), ("", int | None), ("x", float),
        ("9" * 400, float), (5, str), ("y", list[str]), (["a", 1], list[str]), ([1], tuple[int, int]),
        ("tanh", Literal["gelu"]), ("[a]", dict[str, str]), ({"a": {"b": "c"}}, dict[str, str]), (True, float),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused(value: Any, kind: Any) -> None:
    with pytest.raises(ValueError):
        convert(value, kind)


@pytest.mark.parametrize(
    ("said", "options", "found"),
    [
        ("fp8: hybrid, fp8_recipe: mxfp8", ["--model.fp8_format=e4m3"], ("e4m3", "mxfp8")),
        ("fp8: e4m3, fp8_format: mxfp8", ["--model.fp8-format", "hybrid"], ("hybrid", "mxfp8")),
        ("fp8: e4m3, fp8_format: delayed, fp8_recipe: null", [], ("e4m3", "delayed")),
        ("fp8_format: hybrid", [], ("hybrid", "tensorwise")),
        ("fp8: e4m3, fp8_recipe: mxfp8", ["--model.fp8=null", "--model.fp8_format=null"], (None, None)),
    ],
)
def test_fp8_format_is_read_as_the_name_that_it_means(
    tmp_path: Path, said: str, options: list[str], found: tuple[str | None, str | None]
) -> None:
    """It was a key of its own, in which an option's 'hybrid' took the place of a file's recipe."""
    sizes = "num_layers: 2, hidden_size: 64, num_attention_heads: 4"
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{{sizes}, {said}}}\noptimizer: {{lr: 1e-4}}\n")
    run = load(path, *options)
    assert (run.model.fp8, run.model.fp8_recipe, run.optimizer.lr) == (*found, 1e-4)
    # estimate and doctor read the same keys
    given = estimate_settings.given_keys([f"--config={path}", *options])
    assert (given.get("model.fp8"), given.get("model.fp8_recipe", found[1])) == found
    assert not any("fp8_format" in key for key in [*given, *run.to_dict()["model"]])


def test_fp8_format_and_what_it_means_may_not_differ_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {fp8: hybrid, fp8_format: mxfp8, fp8_recipe: delayed}\n")
    for read_it in (load, lambda path: estimate_settings.given_keys([f"--config={path}"])):
        with pytest.raises(
            ValueError, match=r"model\.fp8_format='mxfp8' conflicts with fp8_recipe='delayed'"
        ):
            read_it(path)


@pytest.mark.parametrize(
    "options",
    [
        ["--model.fp8_format=mxfp8", "--model.fp8_recipe=delayed"],
        ["--model.fp8=hybrid", "--model.fp8-format", "e4m3"],
    ],
)
def test_fp8_format_and_what_it_means_may_not_differ_in_options(options: list[str]) -> None:
    """The later one won in silence."""
    for parse in (run_config.parse, estimate_settings.given_keys):
        with pytest.raises(
            ValueError, match=r"model\.fp8_format=(mxfp8|e4m3) conflicts with --model.fp8(_recipe=d|=h)"
        ):
            parse(options)


@pytest.mark.parametrize("option", ["--fp8-format=hybrid", "--model.fp8_fromat=mxfp8"])
def test_the_hint_for_megatrons_flag_names_both_settings(option: str) -> None:
    hint = re.escape("Did you mean model.fp8 (hybrid, e4m3) or model.fp8_recipe (tensorwise, mxfp8, ...)?")
    for parse in (run_config.parse, estimate_settings.given_keys):
        with pytest.raises(ValueError, match=hint):
            parse([option])


# ------------------------------------------------------------------------------------------------ paths


@pytest.mark.parametrize(
    ("option", "path", "words"),
    [
        ("run_dir", "a\0b", "holds a NUL"),
        ("resume", "x" * 300, "File name too long"),
        ("data.paths", "loop/x", "symbolic links"),
        ("checkpoint.folder", " ", "is empty"),
        ("model.fp8_size_filter", "", "is empty"),
    ],
)
def test_a_path_that_can_be_none_is_refused_by_the_name_of_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, path: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    add = "+" if option == "data.paths" else ""
    with pytest.raises(ValueError, match=rf"{re.escape(option)}=.*{words}"):
        load("tiny_gpt_cpu", f"--{option}{add}={path}")


def test_config_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").touch()
    for path, words in (
        ("", "--config='' is empty"),
        (str(tmp_path / "empty.yaml"), "empty.yaml is empty: it needs keys"),
        (str(tmp_path), f"is a folder: give a YAML file, such as {tmp_path}/config.yaml"),
        ("x" * 300, "File name too long"),
    ):
        with pytest.raises(ValueError, match=words):
            load(path)
