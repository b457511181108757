"""The command line as people run it: processes, torchrun, an environment without anything of a launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.support.fork_server import python
from megatron_fp8.kernels.cpu import library

ROOT = Path(__file__).parents[2]

APP = str(ROOT / "tests" / "support" / "app.py")

MEASURED = {"tokens_per_s", "peak_memory"}  # not a function of config and seed

MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 128,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.0,
    "fp8": "hybrid",
    "fp8_format": "delayed",
    "first_last_layers_bf16": True,
    "num_layers_at_start_in_bf16": 2,
}

TWO_RANKS = ["--model.tensor_model_parallel_size=2", "--model.sequence_parallel=true"]


def environment(**more):
    """This environment without anything of a launcher; one thread."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TORCHELASTIC"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def empty_cache(folder):
    """The path of a new XDG_CACHE_HOME in `folder`: empty, but for compiled kernels, which take a core ten seconds."""
    ours = folder / "cache" / "megatron_fp8"
    ours.mkdir(parents=True)
    (ours / "kernels").symlink_to(next(library.folders()))
    return str(ours.parent)


def run(*command, timeout=150, cwd=None, **variables):
    """python COMMAND, in a forked process: without the seconds of imports."""
    return python(*map(str, command), env=environment(**variables), timeout=timeout, cwd=cwd)


def run_each(folder, commands, *, timeout=300, **options):
    """name -> (exit code, stderr, stdout) of each of these commands, one after the other in one forked process."""
    path = folder / "commands.json"
    path.write_text(json.dumps([list(map(str, command)) for command in commands.values()]))
    done = run(APP, "heard", path, timeout=timeout, **options)
    assert done.returncode == 0, done.stderr
    return dict(zip(commands, map(tuple, json.loads(done.stdout.splitlines()[-1])), strict=True))


def run_all(folder, commands, **options):
    """(exit code, stderr) of each of these commands, likewise."""
    found = run_each(folder, dict(enumerate(commands)), **options)
    return [(code, said) for code, said, _ in found.values()]


def torchrun(*command, python=sys.executable, cwd=None, input=None):
    """Two ranks of a command, by torch's own launcher, in real processes; forked ones if `python` is a forking one.

    `input`: what they find in their stdin, which they share.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [python, *launcher, *map(str, command)],
        capture_output=True, text=True, timeout=150, env=environment(), check=False,
        cwd=cwd, input=input,
    )  # fmt: skip


def launched(*command, python, cwd=None, **variables):
    """megatron-fp8 launch COMMAND, in forked processes; `python`: a forking one."""
    return subprocess.run(
        [python, "-m", "megatron_fp8", "launch", *map(str, command)],
        capture_output=True, text=True, timeout=150, env=environment(**variables), check=False, cwd=cwd,
    )  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
