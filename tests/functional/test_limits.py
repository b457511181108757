"""`train` under limits of its shell and in a locale of ASCII: one line, which names the limit and how to raise it."""

import re
import subprocess
import sys

import pytest

from tests.support.command import environment, run

WORDS = (
    "train",
    "--config=tiny_gpt_cpu",
    "--train.train_iters=2",
    "--model.tensor_model_parallel_size=1",
    "--model.sequence_parallel=false",
)
LIMITED = """
import os, resource, sys
from megatron_fp8.commands.main import main
files, pages = len(os.listdir("/proc/self/fd")), int(open("/proc/self/statm").read().split()[0])
used = {"RLIMIT_NOFILE": files, "RLIMIT_AS": pages * resource.getpagesize()}[sys.argv[1]]
most = used + int(sys.argv[2])
resource.setrlimit(getattr(resource, sys.argv[1]), (most, most))
sys.exit(main(sys.argv[3:]))
"""
"""LIMIT ROOM ARGUMENTS: the command, which may have so much more than a process has when it starts."""


@pytest.mark.parametrize(
    "limit, room, words",
    [
        ("RLIMIT_NOFILE", 3, r"This process may open \d+ files \(`ulimit -n`\)"),
        ("RLIMIT_AS", 10 << 20, r"`ulimit -v` allows [\d,]+ MiB"),  # where gloo would hang for ever
    ],
)
def test_a_limit_of_the_shell_is_named(tmp_path, limit, room, words):
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)
    done = run(script, limit, room, *WORDS, f"--data.cache_dir={tmp_path / 'cache'}", cwd=tmp_path)
    said = done.stderr
    assert done.returncode == 2 and re.search(words, said) and "another rank" not in said, said


def test_names_of_utf8_in_a_locale_of_ascii(tmp_path):
    variables = environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    command = [sys.executable, "-m", "megatron_fp8", *WORDS, "--data=été.txt"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, timeout=150)
    said = done.stderr.decode()
    assert done.returncode == 2 and "The locale (LC_ALL=C" in said and "no UTF-8" not in said, said
    assert "LC_ALL=C.UTF-8 or PYTHONUTF8=1" in said
