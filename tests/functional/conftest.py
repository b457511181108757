"""Fixtures of several functional tests: a small run's config, in a folder of its own for each test file."""

import random

import pytest
import yaml

from tests.support.command import MODEL
from tests.support.ports import held_ports


@pytest.fixture
def port():
    """Where a test's programs may listen."""
    with held_ports(1) as (found,):
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("app")


@pytest.fixture(scope="module")
def config(folder):
    """A run of four iterations with accumulation of two micro-batches, on text of a few words."""
    words = random.Random(0).choices(["spam", "eggs", "ham", "toast", "tea", "\n"], k=60_000)
    (folder / "text.txt").write_text(" ".join(words))
    content = {
        "model": MODEL,
        "train": {
            "train_iters": 4, "micro_batch_size": 2, "global_batch_size": 4, "seq_length": 64,
            "eval_interval": 2, "eval_iters": 1, "log_interval": 2,
        },
        "optimizer": {"lr": 0.01, "lr_warmup_iters": 1},
        "data": {"paths": [str(folder / "text.txt")], "split": "80,20,0", "cache_dir": str(folder / "cache")},
    }  # fmt: skip
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
