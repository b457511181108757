"""A run's own file, of which the parser is shown what is not a default: the same values, the same refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.estimate import settings as estimate_settings
from megatron_fp8.train.config import run_config
from megatron_fp8.train.config.run_config import load

CHANGES = [
    ("", ""),
    ("rotary_percent: 1.0", "rotary_percent: 0.5"),
    ("rotary_percent: 1.0", "rotary_percent: 1"),
    ("fp16: false", "fp16: no"),
    ("seed: 1234", "seed: 1e3"),
    ("seed: 1234", "seed: 2020-01-01"),
    ("rotary_base: 10000", "rotary_base: 1e4"),
    ("rope_scaling: false", "rope_scaling: 'false'"),
    ("rotary_base: 10000", "rotary_base:\n    10001"),
    ("rotary_percent: 1.0", "rotary_percent: -0.0"),
    ("run_dir: runs/", "run_dir: 1e-5/"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    load("tiny_gpt_cpu").save(path)
    return path


def read(path: Path, *options: str) -> str:
    try:
        return repr(load(path, *options))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_the_parser_need_not_see_defaults(
    written: Path, tmp_path: Path, monkeypatch: Any, before: str, after: str
) -> None:
    assert before in written.read_text()
    path = tmp_path / "config.yaml"
    path.write_text(written.read_text().replace(before, after, 1) if before else written.read_text())
    found = read(path)
    monkeypatch.setattr(run_config, "_is_default", lambda key, value: False)
    assert found == read(path)


def test_a_default_that_another_file_or_option_stands_before_is_seen(written: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("model: {rotary_percent: 0.5}\n")
    assert run_config.parse([f"--config={other}", f"--config={written}"]).model.rotary_percent == 1.0
    assert run_config.parse([f"--config={written}", f"--config={other}"]).model.rotary_percent == 0.5


@pytest.mark.parametrize(
    ("said", "options", "found"),
    [
        ("fp8: hybrid, fp8_recipe: mxfp8", ["--model.fp8_format=e4m3"], ("e4m3", "mxfp8")),
        ("fp8: e4m3, fp8_format: mxfp8", ["--model.fp8-format", "hybrid"], ("hybrid", "mxfp8")),
        ("fp8: e4m3, fp8_format: mxfp8", ["--model.fp8_format=rowwise"], ("e4m3", "rowwise")),
        ("fp8: e4m3, fp8_format: mxfp8", ["--model.fp8_recipe=delayed"], ("e4m3", "delayed")),
        ("fp8: e4m3, fp8_format: null, fp8_recipe: delayed", [], ("e4m3", "delayed")),
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
    given = estimate_settings.given_keys([f"--config={path}", *estimate_settings.joined(options)])
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


@pytest.mark.parametrize("option", ["--fp8-format=hybrid", "--fp8_format=mxfp8", "--model.fp8_fromat=mxfp8"])
def test_the_hint_for_megatrons_flag_names_both_settings(option: str) -> None:
    hint = re.escape("Did you mean model.fp8 (hybrid, e4m3) or model.fp8_recipe (tensorwise, mxfp8, ...)?")
    for parse in (run_config.parse, estimate_settings.given_keys):
        with pytest.raises(ValueError, match=hint):
            parse([option])


def test_a_runs_own_file_is_shortened(written: Path, monkeypatch: Any) -> None:
    """Else nothing is gained."""
    seen = []
    monkeypatch.setattr(run_config, "_typed", lambda arguments, given: seen.extend(arguments) or {})
    load(written)
    assert len(seen) == 1 and seen[0].count("\n") < 100 < len(run_config.known_keys())
