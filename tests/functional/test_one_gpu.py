"""docs/one_gpu.md: its commands for text and training run, with a small model in place of one for a GPU."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import yaml

from megatron_fp8.commands.main import main
from tests.support.command import ROOT, empty_cache, run

PAGE = (ROOT / "docs" / "one_gpu.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^megatron-fp8 (.+)$", PAGE, re.M)
SMALL = (
    "--model.num_layers=3 --model.hidden_size=64 --model.num_attention_heads=4 --model.num_query_groups=2"
    " --model.kv_channels=16 --model.ffn_hidden_size=128 --train.seq_length=32 --train.micro_batch_size=2"
    " --train.global_batch_size=4 --train.eval_iters=1 --train.train_iters="
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The page's commands from the tokenizer on, in its order, and what each printed."""
    folder = tmp_path_factory.mktemp("one_gpu")
    (folder / "my_corpus").mkdir()
    for number, source in enumerate(sorted((ROOT / "megatron_fp8" / "numerics").glob("*.py"))):
        row = json.dumps({"text": source.read_text(encoding="utf-8")}) + "\n"
        (folder / "my_corpus" / f"part-{number}.jsonl").write_text(row, encoding="utf-8")
    found, iterations, cache = {}, iter((6, 6, 8)), empty_cache(folder)
    for command in COMMANDS[3:]:
        words = shlex.split(command)
        if words[0] == "train":
            words += f"{SMALL}{next(iterations)}".split()
        if words[0] == "diagnose":
            words += ["--budget=40"]
        done = run("-m", "megatron_fp8", *words, cwd=folder, timeout=200, XDG_CACHE_HOME=cache)
        assert done.returncode == 0, (command, done.stderr)
        found[command] = done.stdout
    assert (folder / "fp8.html").is_file() and (folder / "exported" / "tokenizer.json").is_file()
    return found


def test_every_command_of_the_page_runs(told: dict[str, str]) -> None:
    trained = [said for command, said in told.items() if command.startswith("train")]
    assert "recipe tensorwise" in trained[0] and "precision   BF16" in trained[1]
    first, second = (re.search(r"iteration +1/6 +loss ([0-9.]+)", said) for said in trained[:2])
    assert first and second and abs(float(first[1]) - float(second[1])) < 0.01, "the same weights and data"
    assert re.search(r"iteration +8/8 ", trained[2]) and "iteration     1/8" not in trained[2], "it goes on"
    assert any(
        "FP8" in said.splitlines()[-1] or "FP8" in said
        for c, said in told.items()
        if c.startswith("diagnose")
    )


def test_what_the_page_says_of_the_config_is_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMANDS[:3] == [
        "doctor", "bench --config one_gpu", "estimate --config one_gpu --device h100 --gpus 1",
    ]  # fmt: skip
    assert main([*shlex.split(COMMANDS[2]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "1.6 billion parameters" in PAGE and round(found["parameters"]["total"] / 1e9, 1) == 1.6
    assert re.search(rf"needs\s+{found['bytes']['total'] / 1e9:.0f} GB by", PAGE) and found["fit"]["fits"]
    saved = sum(found["bytes"][part] for part in ("weights", "masters", "moments"))
    assert f"({saved / 1e9:.0f} GB each)" in PAGE
    config = yaml.safe_load((ROOT / "examples" / "configs" / "one_gpu.yaml").read_text())
    assert config["train"]["train_iters"] == 2000 and config["model"]["vocab_size"] == 32768
