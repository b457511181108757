"""Which key of a config an unknown one means."""

import re

import pytest
import torch

from megatron_fp8 import TransformerConfig, convert_to_fp8
from megatron_fp8.estimate import config_reader as settings
from megatron_fp8.plan.settings import NOT_A_KEY, OTHER_WORDS, nearest_key
from megatron_fp8.train.config.model_section import transformer_config
from megatron_fp8.train.config.run_config import known_keys, parse

MEANT = {
    "train.iters": "train.train_iters",
    "train.iter": "train.train_iters",
    "training.steps": "train.train_iters",
    "training.seq_len": "train.seq_length",
    "train.batch_size": "train.micro_batch_size",
    "lr": "optimizer.lr",
    "train.learning_rate": "optimizer.lr",
    "train.save_interval": "checkpoint.save_interval",
    "checkpoint.interval": "checkpoint.save_interval",
    "model.hidden": "model.hidden_size",
    "output_dir": "run_dir",
    "run_dri": "run_dir",
    "fp8_format": NOT_A_KEY,
    "model.fp8_fromat": NOT_A_KEY,
    "nproc_per_node": "megatron-fp8 launch --ranks N train",
    "zzzzqq": None,
}


@pytest.mark.parametrize("given", MEANT)
def test_the_key_that_is_meant_whatever_its_section(given):
    assert nearest_key(given, known_keys()) == MEANT[given]


def test_what_other_programs_words_mean_is_there():
    assert {key for key in OTHER_WORDS if " " not in key} <= {*known_keys()}
    own = {key.rpartition(".")[2] for key in known_keys()}
    assert not own & {word for words in OTHER_WORDS.values() for word in words.split()}


TINY = ["--config=tiny_gpt_cpu"]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--model.fp8=tensorwise", "write model.fp8='hybrid' and model.fp8_recipe='tensorwise'."),
        ("--model.fp8_recipe=e4m3", "'e4m3' names element formats: write model.fp8='e4m3'."),
        ("--train.iters=3", "Did you mean train.train_iters?"),
        ("--run_dir=a\udcff", "holds bytes that are no UTF-8"),
    ],
)
@pytest.mark.parametrize(
    "reads",
    [lambda options: transformer_config(parse(options).model), settings.read],
    ids=["train", "estimate"],
)
def test_train_and_estimate_name_what_was_meant(reads, option, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        reads([*TINY, option])


def test_the_same_of_a_config_in_python_and_of_convert_to_fp8():
    with pytest.raises(ValueError, match="'mxfp8' is a recipe: write fp8='hybrid' and fp8_recipe='mxfp8'"):
        TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1, fp8="mxfp8")
    with pytest.raises(ValueError, match="'hybrid' names element formats: give it as fp8"):
        convert_to_fp8(torch.nn.Linear(16, 16), "hybrid")
    with pytest.raises(ValueError, match="Did you mean 'blockwise'"):
        convert_to_fp8(torch.nn.Linear(16, 16), "blockwize")


def test_a_file_of_data_whose_name_is_no_utf8():
    with pytest.raises(ValueError, match=r"data.paths=.* holds bytes that are no UTF-8"):
        parse([*TINY, "--data", "bad\udcff.txt"])
