"""Every key of a run's config has its line of help."""

import re

import pytest

from megatron_fp8.train.config import key_help
from megatron_fp8.train.config.run_config import known_keys


@pytest.fixture(scope="module")
def found():
    return key_help.key_help()


def test_no_key_is_without_help(found):
    assert list(found) == known_keys()
    assert not [key for key, line in found.items() if not re.search(r"\w+.? \w+", line)]


def test_each_is_one_line_that_ends(found):
    assert not {key: line for key, line in found.items() if "\n" in line or len(line) > 130}
    assert found["train.train_iters"] == "Iterations (optimizer steps) to run."
    assert (
        found["model.num_layers"] == "Number of transformer layers in a transformer block."
    )  # Megatron-Core's


def test_what_is_said_here_is_of_keys_that_are(found):
    assert set(key_help.OWN) <= set(found)
    assert found["model.fp8"] == key_help.OWN["model.fp8"]
