"""examples/reshard.sh, small: BF16, then FP8 on other ranks, then BF16 on other ranks again, one training."""

import json
import subprocess
from pathlib import Path

from tests.support.command import ROOT, environment, lines

SMALL = [
    "--model.num_layers=2", "--model.hidden_size=64", "--model.ffn_hidden_size=128", "--model.kv_channels=16",
    "--model.num_attention_heads=4", "--model.first_last_layers_bf16=false", "--train.seq_length=32",
    "--train.eval_iters=0", "--train.micro_batch_size=8", "--optimizer.lr_warmup_iters=0", "--optimizer.lr=0.01",
]  # fmt: skip


def test_the_example_trains_one_model_in_three_ways(tmp_path, forking_python):
    runs = tmp_path / "runs"
    text = tmp_path / "text.txt"
    text.write_text("all work and no play makes jack a dull boy\n" * 1000)
    config = "examples/configs/tiny_gpt_cpu.yaml"
    data = ["--data.split=1,0,0", f"--data.paths=['{text}']", f"--data.cache_dir={tmp_path / 'cache'}"]
    done = subprocess.run(
        ["bash", "examples/reshard.sh", *SMALL, *data],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
        env=environment(RUNS=str(runs), ITERATIONS="8", CONFIG=config, PYTHON=forking_python),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = {run: lines(runs / run / "metrics.jsonl") for run in ("bf16", "fp8", "back")}
    assert [line["iteration"] for run in metrics.values() for line in run] == list(range(1, 25))
    losses = [line["lm_loss"] for run in metrics.values() for line in run]
    assert losses[0] > 5 and losses[23] < losses[8] < losses[0] - 1
    for last, first in ((7, 8), (15, 16)):  # no jump where a run takes over
        assert abs(losses[first] - losses[last]) < 0.5, losses
    assert [run[0]["fp8_gemms"] > 0 for run in metrics.values()] == [False, True, False]
    for said in (
        "delayed scaling starts here: scales of 8 weights",
        "the delayed-scaling state of 24 tensors is dropped: this run uses BF16",
        "another parallel layout: random streams (dropout) restart",
        "layout      tensor 2, pipeline 1",
        "changed train.train_iters",
    ):
        assert said in done.stdout, said
    states = [
        json.loads(Path(runs, run, "checkpoints", f"iter_{last:07d}", "manifest.json").read_text())["state"]
        for run, last in (("bf16", 8), ("fp8", 16), ("back", 24))
    ]
    assert [state["optimizer_step"] for state in states] == [8, 16, 24]
    assert [state["consumed_samples"] for state in states] == [64, 128, 192]
