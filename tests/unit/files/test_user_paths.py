"""What commands say of a folder that is not what they ask for."""

import pytest

from megatron_fp8.commands.main import main
from megatron_fp8.files.checkpoint import find_checkpoint
from megatron_fp8.files.user_paths import config_choices, example_configs, find_config, is_run, path_hint
from megatron_fp8.train.config.run_config import parse
from tests.support.checkpoint_files import write_checkpoint


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A model of transformers', an adapter, a folder of two runs, one of which `import` made, and a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    (tmp_path / "all" / "one").mkdir(parents=True)
    (tmp_path / "all" / "one" / "report.json").write_text("{}")
    (tmp_path / "all" / "two" / "checkpoints").mkdir(parents=True)
    (tmp_path / "all" / "two" / "config.yaml").write_text("model: {}\n")
    (tmp_path / "file.txt").write_text("x")
    return tmp_path


IMPORT = "make a run of it first: megatron-fp8 import model RUN_DIR."
SAID = {
    ("export", "model", "out"): IMPORT,
    ("report", "model"): IMPORT,
    (
        "parity",
        "lora",
        "out",
    ): "It is an adapter; merge it into its model (merge_and_unload), save that, and make a run",
    ("report", "all"): "give one of the runs in it: all/one, all/two.",
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
    assert (path_hint(tmp_path) or "").endswith(f"{tmp_path / 'run5'} and 3 more")
    assert is_run(tmp_path / "run0") and not is_run(tmp_path)


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


@pytest.mark.parametrize("content", ["", "checkpoint: x", "checkpoint: {folder: [a]}"])
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


# ----------------------------------------------------------------------------------------- shipped configs


def test_a_name_is_a_shipped_config_and_a_file_is_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = example_configs()["tiny_gpt_cpu"]
    assert shipped.is_file()
    assert find_config("tiny_gpt_cpu") == find_config("tiny_gpt_cpu.yaml") == str(shipped)
    (tmp_path / "tiny_gpt_cpu").write_text("model: {}\n")
    assert find_config("tiny_gpt_cpu") == "tiny_gpt_cpu"
    for other in ("no_such", "folder/tiny_gpt_cpu", "", "x" * 9999, "a\0b"):
        assert find_config(other) == other


def test_a_name_that_is_none_is_answered_by_the_nearest():
    for given in ("tiny_gpt", "tiny_gtp_cpu", "configs/tiny_gpt.yaml", "Tiny_GPT_CPU"):
        assert config_choices(given).startswith("Did you mean tiny_gpt_cpu? Shipped ones, by name: "), given
    assert config_choices("llama3").startswith("Did you mean llama3_70b or llama3_8b?")
    assert config_choices("zzz").startswith("Shipped ones") and config_choices("").startswith("Shipped ones")
