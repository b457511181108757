"""How long until something happens? `python -m benchmarks.startup [--write]`

Commands that print a text, against an interpreter that does nothing and one that imports torch; then where the time
goes until the first iteration of the tiny run is done, on a warm cache: each stage is a function of the app, timed in the
run's own process, and 'the rest' is what none of them has. CPU seconds stand beside wall seconds, since a machine that
others use is slow by the wall alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import environment, table, write_results
from megatron_fp8.commands.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
NOTHING, TORCH, PACKAGE = "python -c pass", "import torch", "import torch, megatron_fp8"
TEXTS = {
    NOTHING: ["-c", "pass"],
    TORCH: ["-c", "import torch"],
    PACKAGE: ["-c", "import torch, megatron_fp8"],
    "megatron-fp8 --help": ["-m", "megatron_fp8", "--help"],
    "megatron-fp8 --version": ["-m", "megatron_fp8", "--version"],
    **{f"megatron-fp8 {name} --help": ["-m", "megatron_fp8", name, "--help"] for name in COMMANDS},
    "megatron-fp8 train --keys": ["-m", "megatron_fp8", "train", "--keys"],
    "megatron-fp8 estimate": ["-m", "megatron_fp8", "estimate", "--config", "tiny_gpt_cpu"],
}
RUN = [
    "train",
    "--config=tiny_gpt_cpu",
    "--model.tensor_model_parallel_size=1",
    "--model.sequence_parallel=false",
]

# Runs in the process that trains. Its clock begins where the parent started it.
STAGES = """\
import sys, time
began, out, arguments = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
stages = {"interpreter": (time.time() - began, time.process_time())}

def now():
    return time.time(), time.process_time()

def stage(name, since):
    wall, cpu = stages.get(name, (0.0, 0.0))
    stages[name] = wall + time.time() - since[0], cpu + time.process_time() - since[1]

since = now()
import torch
stage("import torch", since)
since = now()
from megatron_fp8 import mcore
mcore.install()
stage("import Megatron-Core, patch it", since)
since = now()
import megatron_fp8.commands.train as app
from megatron_fp8.mcore import report as _, guard_plans as _, iteration as _, sites as _
from megatron_fp8.train import loop, metrics, model, report, step
from megatron_fp8.train.resume import checkpoint_compat, checkpoints, run_folder
from megatron_fp8.train.config import model_section, run_config
from megatron_fp8.train.data import datasets, indexed_dataset, tokenizers
from megatron_fp8.train.launch import config_consistency, parallel
from megatron_fp8 import telemetry
from megatron_fp8.kernels.cpu import library
stage("import the app", since)

def timed(owner, attribute, name):
    original = getattr(owner, attribute)
    def call(*args, **kwargs):
        since = now()
        try:
            return original(*args, **kwargs)
        finally:
            stage(name, since)
    setattr(owner, attribute, call)

timed(run_config, "parse", "read the config")
timed(parallel, "connect", "process group")
timed(parallel, "join", "process group")
timed(datasets, "find_data", "data")
timed(datasets, "check_data", "data")
timed(datasets, "build_datasets", "data")
timed(indexed_dataset, "corpus_bigram_entropy", "bigram entropy of the data")
timed(model, "build_chunks", "model")
timed(model, "build_optimizer", "optimizer")
timed(report, "build_report", "report")
timed(library, "load", "kernels load")
timed(metrics.MetricsWriter, "__init__", "writers (TensorBoard)")
first = step.Stepper.step

def until_first(self, training):
    since = now()
    found = first(self, training)
    stage("first iteration", since)
    stages["all"] = time.time() - began, time.process_time()
    import json
    with open(out, "w") as file:
        json.dump(stages, file)
    return found

step.Stepper.step = until_first
sys.exit(app.main(arguments[1:]))
"""


def spent(arguments: list[str]) -> tuple[float, float]:
    """(wall, CPU) seconds of a Python process."""
    before, since = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT)
    wall, after = time.perf_counter() - since, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"python {' '.join(arguments)} failed:\n{done.stderr}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def texts(repetitions: int) -> dict[str, dict[str, float]]:
    """Medians over rounds in which every command runs once."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in TEXTS}
    for turn in range(-1, repetitions):
        for name, arguments in TEXTS.items():
            one = spent(arguments)
            if turn >= 0:
                found[name].append(one)
    return {
        name: {"wall": statistics.median(w for w, _ in each), "cpu": statistics.median(c for _, c in each)}
        for name, each in found.items()
    }


def first_iteration(repetitions: int) -> dict[str, tuple[float, float]]:
    """Stage -> (wall, CPU) seconds of the median run, to the end of the first iteration."""
    runs: list[dict[str, tuple[float, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(-1, repetitions):
            out = Path(folder) / f"{turn}.json"
            options = [
                *RUN,
                f"--run_dir={folder}/run{turn}",
                "--train.train_iters=1",
                "--train.eval_interval=1000",
            ]
            spent(["-c", STAGES, repr(time.time()), str(out), *options])
            if turn >= 0:
                runs.append(json.loads(out.read_text()))
    found = sorted(runs, key=lambda run: run["all"])[len(runs) // 2]
    whole = found.pop("all")
    known = [sum(each) for each in zip(*found.values(), strict=True)]
    return {**found, "the rest": (whole[0] - known[0], whole[1] - known[1]), "all": whole}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5, help="rounds (default %(default)s)")
    parser.add_argument(
        "--write", action="store_true", help="write the result files under benchmarks/results"
    )
    options = parser.parse_args()
    told = texts(options.repetitions)
    nothing, torch = told[NOTHING]["cpu"], told[TORCH]["cpu"]
    rows = [
        [
            name,
            f"{one['wall']:.2f}",
            f"{one['cpu']:.2f}",
            f"{one['cpu'] / nothing:.1f}",
            f"{one['cpu'] / torch:.2f}",
        ]
        for name, one in told.items()
    ]
    header = ["command", "wall s", "CPU s", "x `python -c pass`", "x `import torch`"]
    stages = first_iteration(max(1, options.repetitions // 2))
    lines = [[name, *(f"{seconds:.2f}" for seconds in both)] for name, both in stages.items()]
    beyond = told[PACKAGE]["cpu"] - torch
    shown = "\n\n".join(
        [
            table(header, rows),
            f"`import megatron_fp8` beyond torch: {beyond:.2f} s of CPU time. `megatron-fp8 estimate` beyond torch:"
            f" {told['megatron-fp8 estimate']['cpu'] - torch:.2f} s.",
            "The tiny run on one rank, until its first iteration is done:",
            table(["stage", "wall s", "CPU s"], lines),
        ]
    )
    print(shown)
    if options.write:
        record: dict[str, Any] = {**environment(["megatron-core"]), "measured": "medians"}
        command = f"python -m benchmarks.startup --repetitions {options.repetitions} --write"
        write_results("startup", "Start-up", command, record, shown, {"texts": told, "stages": stages})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
