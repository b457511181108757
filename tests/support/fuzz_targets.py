"""What fuzzing damages: a corpus, a config, a run of two iterations, its export, calibration and size table, all tiny."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck

from megatron_fp8.recipe import Float8CurrentScaling
from tests.support.run_in_process import heard
from tests.support.shared_folder import made_once
from tests.support.size_table import make_table

CONFIG = {
    "model": {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 1, "ffn_hidden_size": 64,
        "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "fp8": "hybrid", "fp8_recipe": "delayed",
    },
    "train": {"train_iters": 2, "micro_batch_size": 1, "global_batch_size": 1, "seq_length": 16, "eval_iters": 0},
    "data": {"paths": ["corpus.txt"], "split": "1,0,0", "cache_dir": "cache"},
    "checkpoint": {"save_interval": 1},
    "telemetry": {"every": 1},
}  # fmt: skip
NEWEST = "iter_0000002"
"""The run's newest checkpoint."""
FILES = (".metadata", "__0_0.distcp", "manifest.json", "metadata.json", "common.pt")
"""What is in it."""
EXPORT = "export run out"
TRAIN = "train --config config.yaml --run_dir=run --train.train_iters=3 --train.eval_iters=0"
FIXTURES = HealthCheck.function_scoped_fixture
"""Suppressed: what is in the fixture `place` is made anew for each example, by `fresh`."""
TEXT = "the quick brown fox jumps over the lazy dog. " * 100


def make(folder: Path) -> None:
    """Fill a folder with all of them; paths inside are relative to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("corpus.txt").write_text(TEXT)
        Path("config.yaml").write_text(yaml.safe_dump(CONFIG))
        for command in (
            "train --config config.yaml --run_dir=run",
            "export run hf",
            "export run hf_shards --max-shard-size 20KB",
            "export run hf_fp8 --format fp8-channel",
            "calibrate run --recipe tensorwise --batches 1 --batch-size 1 --out calibration",
            "bench --only quantise --recipe tensorwise --shape 16x16x1 --repetitions 4 --out bench.json",
        ):
            done = heard(*command.split())
            assert done.code == 0, done.err
        for name in ("hf", "hf_shards", "hf_fp8"):
            write_tokenizer(Path(name))
        make_table(Path("table.json"), {(32, 64, 16): 0.9, (64, 32, 16): 1.2}, Float8CurrentScaling())


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of words and what lies beside one, as Hugging Face's tools write them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["<s>", "</s>", "?", *TEXT.split()[:9]])}, "?")
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    made.save(str(folder / "tokenizer.json"))
    beside = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(beside))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [1]}))


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that nobody changes."""
    return made_once(tmp_path_factory, "victims", make)


@pytest.fixture
def place(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory for one example after another; `fresh(place, originals)` before each."""
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def fresh(place: Path, originals: Path, *names: str) -> Path:
    """Empty the folder and put copies of these into it (nothing named: of all)."""
    for entry in list(place.iterdir()):
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    for source in [originals / name for name in names] or originals.iterdir():
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, place / source.name)
    return place
