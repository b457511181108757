"""`train` under limits of its shell and in a locale of ASCII: one line, which names the limit and how to raise it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WORDS = (
    "--config=tiny_gpt_cpu",
    "--train.train_iters=2",
    "--model.tensor_model_parallel_size=1",
    "--model.sequence_parallel=false",
)


def started(folder, shell: str, *words: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "megatron_fp8", "train", *WORDS, *words]
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    return subprocess.run(
        ["bash", "-c", f'{shell} && exec "$@"', "bash", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    "shell, words",
    [
        ("ulimit -n 80", "This process may open 80 files (`ulimit -n`)"),
        ("ulimit -v 1200000", "`ulimit -v` allows 1,171 MiB"),  # where gloo would hang for ever
    ],
)
def test_a_limit_of_the_shell_is_named(tmp_path, shell, words):
    done = started(tmp_path, shell, f"--data.cache_dir={tmp_path / 'cache'}")
    said = done.stderr.decode()
    assert done.returncode == 2 and words in said and "another rank" not in said, said


def test_names_of_utf8_in_a_locale_of_ascii(tmp_path):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = started(tmp_path, "true", "--data=été.txt", **ascii_only)
    said = done.stderr.decode()
    assert done.returncode == 2 and "The locale (LC_ALL=C" in said and "no UTF-8" not in said, said
    assert "LC_ALL=C.UTF-8 or PYTHONUTF8=1" in said
