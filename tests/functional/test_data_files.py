"""Files that people have, by the command line: short text, chats, binary files; an import without its tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.command import MODEL, lines, run_each, torchrun
from tests.support.hf_small import write_family

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASSISTANT = ["--data.tokenizer=tokenizer.json", "--data.loss=assistant"]


def write_chats(folder: Path) -> None:
    """A tokenizer of words with a chat template, and chats: long questions, answers of 1 to 12 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<|end|>", "<|user|>", "<|assistant|>", "<unk>", "spam", "eggs", "ham", "toast", "tea"]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(words[:3])
    made.save(str(folder / "tokenizer.json"))
    beside = {"eos_token": "<|end|>", "chat_template": TURNS}
    (folder / "tokenizer_config.json").write_text(json.dumps(beside))
    drawn = random.Random(0)
    chats = [
        {
            "messages": [
                {"role": role, "content": " ".join(drawn.choices(words[4:], k=drawn.randint(1, most)))}
                for role, most in (("user", 90), ("assistant", 12)) * 2
            ]
        }
        for _ in range(120)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    pytest.importorskip("datasets").Dataset.from_list(chats).to_parquet(folder / "chats.parquet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "run.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {**MODEL, "num_layers": 2, "hidden_dropout": 0.0, "fp8": None, "fp8_format": None,
                          "num_layers_at_start_in_bf16": 1, "first_last_layers_bf16": False, "vocab_size": 512},
                "train": {"train_iters": 2, "micro_batch_size": 4, "global_batch_size": 4, "seq_length": 64,
                          "eval_iters": 1},
                "data": {"cache_dir": "cache"},
            }
        )
    )  # fmt: skip
    text = Path(json.__file__).read_text() * 30
    (folder / "text.txt").write_text(text[:300_000])
    torch.manual_seed(0)
    write_family(folder / "hf", {"vocab_size": 512}, lambda *size: torch.randn(*size) * 0.02)
    write_chats(folder)
    return folder


@pytest.fixture(scope="module")
def heard(folder: Path) -> dict[str, tuple[int, str, str]]:
    """(exit code, stderr, stdout) of each command, one after the other in one process, from the folder."""

    def train(name: str, *options: Any) -> list[str]:
        return ["train", "--config=run.yaml", f"--run_dir={name}", *map(str, options)]

    imported = ["train", "--config=imported/config.yaml", "--train.train_iters=1", "--train.seq_length=64",
                "--data=text.txt", "--data.cache_dir=cache"]  # fmt: skip
    commands = {
        "binary": train("binary", "--data", torch._C.__file__),
        "short": train("short", "--data", "text.txt"),
        "chats": train("chats", "--data=chats.jsonl", *ASSISTANT),
        "one by one": train("one", "--data=chats.parquet", *ASSISTANT, "--train.micro_batch_size=1"),
        "no chats": train("no", "--data=text.txt", *ASSISTANT),
        "import": ["import", "hf", "imported"],
        "without": imported,
        "generate": ["generate", "imported", "--prompt=spam"],
        "bytes": [*imported, "--data.tokenizer=bytes"],
    }
    return run_each(folder, commands, cwd=folder)


def test_a_binary_file_is_refused_by_name(heard):
    code, said, _ = heard["binary"]
    assert code == 2 and Path(torch._C.__file__).name in said and "is no text (byte 7 is NUL)" in said


def test_three_hundred_kilobytes_train_and_validate(heard, folder):
    code, said, _ = heard["short"]
    assert code == 0, said
    assert "warning: data.split='96,4,0' leaves nothing for validation of a text of 300,000 bytes" in said
    assert lines(folder / "short" / "validation.jsonl")


def test_answers_are_learned_alike_whatever_the_micro_batches_are(heard, folder):
    """Each token counts once. Means of micro-batches, which have 0 to 60 of them, would give other gradients."""
    for name in ("chats", "one by one"):
        assert heard[name][0] == 0, heard[name][1]
    together, alone = (lines(folder / name / "metrics.jsonl") for name in ("chats", "one"))
    for a, b in zip(together, alone, strict=True):
        assert a["lm_loss"] == pytest.approx(b["lm_loss"], rel=1e-3)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=5e-3)


def test_two_ranks_learn_the_same_answers(heard, folder, forking_python):
    done = torchrun(
        "-m", "megatron_fp8", "train", "--config=run.yaml", "--run_dir=two", "--data=chats.jsonl", *ASSISTANT,
        "--train.micro_batch_size=2", cwd=folder, python=forking_python,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for a, b in zip(lines(folder / "chats/metrics.jsonl"), lines(folder / "two/metrics.jsonl"), strict=True):
        assert a["lm_loss"] == pytest.approx(b["lm_loss"], rel=1e-3)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=5e-3)


def test_a_loss_on_answers_wants_chats(heard):
    code, said, _ = heard["no chats"]
    assert code == 2 and "data.loss=assistant and 'text.txt', which has no chats" in said


def test_an_import_without_its_tokenizer_trains_on_bytes_only_where_that_is_said(heard):
    assert heard["import"][0] == 0 and "no tokenizer: train and generate need" in heard["import"][2]
    for name in ("without", "generate"):
        code, said, _ = heard[name]
        assert code == 2 and "imported without its tokenizer, and bytes mean nothing to it" in said, said
    assert heard["bytes"][0] == 0, heard["bytes"][1]
