"""Every key of a run's config has its line of help."""

import re

import pytest

from megatron_fp8.train.config import key_help
from megatron_fp8.train.config.run_config import known_keys


@pytest.fixture(scope="module")
def found():
    return key_help.key_help()


def test_no_key_is_without_help(found):
    assert tuple(found) == known_keys()
    assert not [key for key, line in found.items() if not re.search(r"\w+.? \w+", line)]


def test_each_is_one_line_that_ends(found):
    assert not {key: line for key, line in found.items() if "\n" in line or len(line) > 130}
    assert found["train.train_iters"] == "Iterations (optimizer steps) to run."
    # Megatron-Core's
    assert found["model.num_layers"] == "Number of transformer layers in a transformer block."


def test_what_is_said_here_is_of_keys_that_are(found):
    assert set(key_help.OWN) <= set(found)
    assert found["model.fp8"] == key_help.OWN["model.fp8"]


def test_lines_fit_a_terminal_and_a_wide_one_has_a_line_for_each_key(found):
    narrow = key_help.key_lines(80)
    assert max(map(len, narrow)) <= 80
    (at,) = (i for i, line in enumerate(narrow) if line.startswith("train.train_iters = "))
    assert narrow[at + 1] == "      Iterations (optimizer steps) to run."
    words = " ".join(" ".join(narrow).split())
    assert all(
        " ".join(f"{key} =".split()) in words and " ".join(line.split()) in words
        for key, line in found.items()
    )
    assert len(key_help.key_lines(1000)) == len(found)
