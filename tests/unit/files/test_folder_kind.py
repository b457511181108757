"""What commands say of a folder that is not what they ask for."""

import pytest

from megatron_fp8.commands.main import main
from megatron_fp8.files.folder_kind import is_run, what_to_give
from megatron_fp8.train.config.run_config import parse


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A model of transformers', a folder of two runs, one of which `import` made, and a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "all" / "one").mkdir(parents=True)
    (tmp_path / "all" / "one" / "report.json").write_text("{}")
    (tmp_path / "all" / "two" / "checkpoints").mkdir(parents=True)
    (tmp_path / "all" / "two" / "config.yaml").write_text("model: {}\n")
    (tmp_path / "file.txt").write_text("x")
    return tmp_path


IMPORT = "make a run of it first: megatron-fp8 import model RUN_DIR."
SAID = {
    ("export", "model", "out"): IMPORT,
    ("inspect", "model"): IMPORT,
    ("report", "model"): IMPORT,
    ("report", "all"): "give one of the runs in it: all/one, all/two.",
    ("report", "all", "--html=page.html"): "give one of the runs in it: ",
    ("export", "all", "out"): "Give one of the runs in it: all/one, all/two.",
    ("report", "file.txt"): "'file.txt' is a file: give the folder of a run.",
    ("report", "all/two/config.yaml"): "give the run that it lies in: ",
    ("report", "nowhere"): "there is no folder 'nowhere': give the folder of a run.",
    (
        "import",
        "org/name",
        "run",
    ): "hf download org/name --local-dir name && megatron-fp8 import name RUN_DIR.",
    ("import", "nowhere", "run"): "there is no such folder; give a folder as transformers' save_pretrained",
    ("import", "file.txt", "run"): "it is a file; give a folder",
}


@pytest.mark.parametrize("words", SAID, ids=" ".join)
def test_what_to_give_instead_is_said_in_one_line(places, capsys, words):
    assert main(list(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and SAID[words] in line


def test_a_model_in_the_place_of_a_config(places):
    with pytest.raises(ValueError, match=f"--config=model is a folder: it is a model .*{IMPORT}"):
        parse(["--config=model"])


def test_of_many_runs_some_are_named(tmp_path):
    for number in range(9):
        (tmp_path / f"run{number}").mkdir()
        (tmp_path / f"run{number}" / "metrics.jsonl").write_text("")
    assert (what_to_give(tmp_path) or "").endswith(f"{tmp_path / 'run5'} and 3 more")
    assert is_run(tmp_path / "run0") and not is_run(tmp_path)
