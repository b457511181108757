"""Import, train, export: what training learned is in the export, or every command says that it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.support import hf_small
from tests.support.command import run

WORDS = ["<s>", "</s>", "?", "spam", "eggs", "ham", "toast", "tea", "milk", "bread"]
ITERATIONS = 3


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """Command -> what it ended with. Run `one` trains by default, run `two` never saves; both in FP8 from BF16."""
    model = hf_small.write(folder / "model", {"bos_token_id": 0, "eos_token_id": 1})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    text = folder / "text.txt"
    text.write_text(" ".join(WORDS[3:] * 400))
    options = [
        "--model.fp8=hybrid", f"--train.train_iters={ITERATIONS}", "--train.seq_length=32", "--train.eval_iters=0",
        "--train.micro_batch_size=2", "--train.global_batch_size=2", "--data.split=1,0,0", "--data", str(text),
        f"--data.cache_dir={folder / 'cache'}",
    ]  # fmt: skip
    found: dict[str, Any] = {}

    def command(name: str, *words: Any) -> None:
        found[name] = run("-m", "megatron_fp8", *words, cwd=folder)
        assert found[name].returncode == 0, found[name].stderr

    for name, more in {"one": [], "two": ["--checkpoint.save_interval=never"]}.items():
        command(f"import {name}", "import", model, f"runs/{name}")
        command(f"train {name}", "train", f"--config=runs/{name}/config.yaml", *options, *more)
        command(f"export {name}", "export", f"runs/{name}", f"out/{name}")
        command(f"inspect {name}", "inspect", f"runs/{name}")
        command(f"generate {name}", "generate", f"runs/{name}", "--prompt", "spam", "--max-new-tokens=2")
    command("diagnose two", "diagnose", "runs/two", "--budget=32")
    command("report two", "report", "runs/two")
    return found


def test_a_run_that_trains_saves_at_its_end(results: dict[str, Any], folder: Path) -> None:
    before, after = (load_file(folder / name / "model.safetensors") for name in ("model", "out/one"))
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(before[name], after[name]), "export wrote the untrained model"
    saves = sorted(path.name for path in (folder / "runs" / "one" / "checkpoints").glob("iter_*"))
    assert saves == ["iter_0000000", f"iter_{ITERATIONS:07d}"]
    done, page, text = results["train one"].stdout.splitlines()[-3:]
    assert done.endswith("everything is in runs/one")
    assert page == "next: megatron-fp8 report runs/one --html report.html"
    assert text == '      megatron-fp8 generate runs/one --prompt "Once upon a time"'
    for command in ("export", "inspect", "generate"):
        done = results[f"{command} one"]
        assert "the run trained to" not in done.stdout + done.stderr


def test_what_was_never_saved_is_said_by_every_command(results: dict[str, Any], folder: Path) -> None:
    before, after = (load_file(folder / name / "model.safetensors") for name in ("model", "out/two"))
    assert all(torch.equal(before[name], after[name]) for name in after)
    assert "; the trained weights are gone, " in results["train two"].stdout.splitlines()[-1]
    for command in ("export", "inspect", "generate", "diagnose"):
        done = results[f"{command} two"]
        said = f"the run trained to iteration {ITERATIONS}, and its newest checkpoint is of iteration 0"
        assert said in done.stdout + done.stderr, command


def test_a_diagnosis_is_of_the_recipe_that_trained_and_not_of_the_import(results: dict[str, Any]) -> None:
    done = results["diagnose two"]
    assert "settings are those of runs/two/config.yaml" in done.stderr
    assert "8 sites" in done.stdout and "BF16, which has nothing" not in done.stderr


def test_a_report_names_its_page(results: dict[str, Any]) -> None:
    assert (
        results["report two"]
        .stdout.splitlines()[-1]
        .endswith("megatron-fp8 report runs/two --html report.html")
    )
