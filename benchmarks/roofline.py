"""How far is estimate's roofline from a real step, on this machine? `python -m benchmarks.roofline [--write]`

Rounds of, for each precision, `megatron-fp8 bench` of the model's GEMMs and two trainings on one rank and one thread.
The estimate is of the best rates over all rounds; a step's time is the CPU time by which the longer training took more,
the least of all rounds, since others may use the machine. A CPU's ratio says nothing of a GPU's: it is here because a
roofline should say how wrong it has been.

--write puts the ratios into megatron_fp8/estimate/calibration.yaml, which `estimate` prints, and into results/roofline.*
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import environment, put_between, table, write_results
from megatron_fp8.estimate.config_reader import read
from megatron_fp8.estimate.device import device
from megatron_fp8.estimate.estimate import estimate

OFF = Path(__file__).parents[1] / "megatron_fp8" / "estimate" / "calibration.yaml"
PAGE = Path(__file__).parents[1] / "docs" / "estimates.md"
BEGIN, END = "<!-- python -m benchmarks.roofline --write: from here -->", "<!-- to here: roofline -->"
MODEL = ["--config=tiny_gpt_cpu", "--model.tensor_model_parallel_size=1", "--model.sequence_parallel=false"]
PRECISIONS = {
    "bf16": ["--model.fp8=null", "--model.fp8_recipe=null"],
    "tensorwise": ["--model.fp8_recipe=tensorwise"],
    "blockwise": ["--model.fp8_recipe=blockwise"],
    "mxfp8": ["--model.fp8_recipe=mxfp8"],
}
SHORT, LONG = 2, 14
"""Iterations of the two trainings."""


def megatron_fp8(*arguments: str) -> float:
    """CPU seconds of a command of the package in a process of its own; its output only if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "megatron_fp8", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"megatron-fp8 {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def benched(folder: Path, name: str, turn: int) -> list[dict[str, Any]]:
    """Rows of this machine; in BF16 those of any recipe serve."""
    path = folder / f"bench-{name}-{turn}.json"
    recipe = PRECISIONS["tensorwise" if name == "bf16" else name]
    megatron_fp8("bench", *MODEL, *recipe, "--only", "quantise,gemm", "--out", str(path))
    content = json.loads(path.read_text())
    (folder / f"device-{name}.json").write_text(json.dumps(content))
    return content["rows"]


def trained(folder: Path, name: str, turn: int) -> float:
    """CPU seconds of an iteration."""
    seconds = []
    for iterations in (SHORT, LONG):
        run = folder / f"run-{name}-{turn}-{iterations}"
        options = [f"--train.train_iters={iterations}", f"--run_dir={run}", "--optimizer.lr_warmup_iters=1"]
        quiet = ["--train.eval_interval=1000000", "--checkpoint.save_interval=never"]
        seconds.append(megatron_fp8("train", *MODEL, *PRECISIONS[name], *options, *quiet))
    return (seconds[1] - seconds[0]) / (LONG - SHORT)


def measure(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Precision -> the roofline's seconds, a real step's, and their ratio."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in PRECISIONS}
    steps: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    for turn in range(rounds):
        for name in PRECISIONS:
            rows[name] += benched(folder, name, turn)
            steps[name].append(trained(folder, name, turn))
            print(f"round {turn + 1}, {name}: {steps[name][-1]:.3f} s", flush=True)
    found = {}
    for name, options in PRECISIONS.items():
        path = folder / f"device-{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "rows": rows[name]}))
        settings = read([*MODEL, *options], gpus=1)
        bound = estimate(settings, device(str(path), settings.model), has_device=False).time.seconds
        found[name] = {"roofline": bound, "step": min(steps[name]), "ratio": min(steps[name]) / bound}
    return found


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--write", action="store_true", help="write calibration.yaml and the result files")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1")  # CPU time adds up over threads
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.rounds)
    rows = [
        [name, f"{one['roofline']:.3f}", f"{one['step']:.3f}", f"{one['ratio']:.2f}"]
        for name, one in found.items()
    ]
    shown = table(["precision", "roofline s", "step s", "step / roofline"], rows)
    print(shown)
    if options.write:
        record = {**environment(["megatron-core"]), "measured": "CPU time of one thread", "threads": 1}
        title = "A real step against estimate's roofline of this machine's own bench"
        command = f"python -m benchmarks.roofline --rounds {options.rounds} --write"
        write_results("roofline", title, command, record, shown, found)
        said = f"{record['processor']}, one thread of {record['cores']} cores, {record['date']}, CPU time:"
        put_between(PAGE, BEGIN, END, f"{said}\n\n{shown}")
        ratios = ", ".join(f"{name}: {one['ratio']:.2f}" for name, one in found.items())
        OFF.write_text(
            "# Written by `python -m benchmarks.roofline --write`: a real step's time over the roofline's, of this"
            f' machine alone.\ndate: "{record["date"]}"\nmachine: {record["processor"]}, one thread\n'
            f"model: tiny_gpt_cpu on one rank\nratio: {{{ratios}}}\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
