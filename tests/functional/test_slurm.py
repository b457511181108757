"""The shipped batch scripts on a real SLURM cluster of two nodes: preempted, warned, cancelled; resumed to the bit.

Run by `make test-slurm`: it needs root, and Debian's packages slurm-wlm and munge (tests/support/slurm_cluster.py).
"""

import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from megatron_fp8.files.checkpoint import complete_checkpoints, read_metadata, read_tensor
from tests.support.slurm_cluster import SlurmCluster, missing, processes_naming

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "slurm"
ITERATIONS = 60
MEASURED = {"tokens_per_s", "peak_memory"}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

CONFIG = {
    "model": {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128,
        "add_bias_linear": False, "hidden_dropout": 0.1, "attention_dropout": 0.0,
        "fp8": "hybrid", "fp8_format": "delayed",
    },
    "train": {
        "train_iters": ITERATIONS, "micro_batch_size": 2, "global_batch_size": 4, "seq_length": 64,
        "eval_interval": 20, "eval_iters": 1, "log_interval": 10, "threads": 1,
    },
    "optimizer": {"lr": 0.01, "lr_warmup_iters": 5, "use_distributed_optimizer": True},
    "checkpoint": {"save_interval": 25},
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    assert not missing(), f"a SLURM cluster needs {missing()}: make test-slurm"
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


class Runs:
    """Jobs of the shipped scripts, two ranks each, on the same small run. Their processes are forked."""

    def __init__(self, cluster, folder, python):
        self.cluster, self.folder, self.python = cluster, folder, python
        words = random.Random(0).choices(["spam", "eggs", "ham", "toast", "tea", "\n"], k=60_000)
        (folder / "text.txt").write_text(" ".join(words))
        data = {"paths": [str(folder / "text.txt")], "split": "80,20,0", "cache_dir": str(folder / "cache")}
        (folder / "small.yaml").write_text(yaml.safe_dump({**CONFIG, "data": data}))

    def submit(self, name, script, *options, arguments=(), **knobs):
        """A job of `script` with data parallelism over two ranks; its number."""
        return self.cluster.submit(
            SCRIPTS / script,
            *options,
            f"--output={self.folder / name}.log",
            arguments=arguments,
            PYTHON=self.python,
            PYTHONPATH=str(ROOT),
            CONFIG=str(self.folder / "small.yaml"),
            RUN_DIR=str(self.folder / name),
            **knobs,
        )

    def wait_for_iteration(self, name, iteration):
        """Until metrics.jsonl has the iteration."""
        path = self.folder / name / "metrics.jsonl"
        self.until(
            lambda: path.exists() and path.read_text().count("\n") >= iteration,
            f"{name} to do iteration {iteration}",
        )

    def until(self, holds, what, timeout=90):
        """Wait, and say what every job said if it takes too long."""
        deadline = time.monotonic() + timeout
        while not holds():
            logs = [path.stem for path in self.folder.glob("*.log")]
            assert time.monotonic() < deadline, f"waited for {what}:\n" + "\n".join(map(self.said, logs))
            time.sleep(0.05)

    def kill_a_rank(self, name):
        """SIGKILL to one of the run's ranks."""
        for pid in processes_naming(str(self.folder / name)):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[0].decode() == sys.executable and not {b"torch.distributed.run", b"launch"} & set(words):
                os.kill(pid, signal.SIGKILL)
                return
        raise AssertionError(f"{name} has no rank:\n{self.said(name)}")

    def resumed(self, name):
        """From which iteration each attempt went on."""
        return [int(n) for n in re.findall(r"^resume .*iteration (\d+) is done", self.said(name), re.M)]

    def ended(self, job, name, *, restarts, state="COMPLETED"):
        """Wait for the job's end, and check how it ended."""
        assert self.cluster.wait(job, *ENDED, timeout=120) == state, self.said(name)
        assert self.cluster.field(job, "Restarts") == str(restarts), self.said(name)

    def said(self, name):
        """Everything that the job and its ranks printed."""
        logs = [self.folder / f"{name}.log", *sorted((self.folder / name / "logs").glob("*"))]
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs if log.exists())

    def records(self, name, file="metrics.jsonl"):
        """What a run recorded, without what is measured."""
        lines = [json.loads(line) for line in (self.folder / name / file).read_text().splitlines()]
        return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines]

    def tensors(self, name):
        """Every tensor of the last checkpoint, as bytes: parameters, optimizer and FP8 state, random streams."""
        last = complete_checkpoints(self.folder / name / "checkpoints")[-1]
        assert last.name == f"iter_{ITERATIONS:07d}"
        metadata = read_metadata(last)
        values = {key: read_tensor(last, metadata, key) for key in metadata.state_dict_metadata}
        return {key: value.contiguous().view(-1).view(torch.uint8) for key, value in values.items()}


@pytest.fixture(scope="module")
def runs(cluster, tmp_path_factory, forking_python):
    return Runs(cluster, tmp_path_factory.mktemp("runs"), forking_python)


@pytest.fixture(scope="module")
def uninterrupted(runs):
    """One node, two ranks, from the first iteration to the last."""
    job = runs.submit("whole", "one_node.sbatch", "--gpus-per-node=2", RANKS_PER_NODE="2")
    runs.ended(job, "whole", restarts=0)
    return "whole"


def assert_same_run(runs, name, reference):
    """Losses, norms and all counts of every iteration, every validation, and every bit of the last checkpoint."""
    assert [line["iteration"] for line in runs.records(name)] == list(range(1, ITERATIONS + 1))
    assert runs.records(name) == runs.records(reference)
    assert runs.records(name, "validation.jsonl") == runs.records(reference, "validation.jsonl")
    mine, theirs = runs.tensors(name), runs.tensors(reference)
    assert mine.keys() == theirs.keys() and len(mine) > 20
    for key, value in mine.items():
        assert torch.equal(value, theirs[key]), key


def loses_a_rank_when_it_is_back(runs, job, name, reason):
    """The job stops for `reason` and is requeued; then a rank dies, and all start again inside the same attempt."""
    runs.until(lambda: runs.resumed(name), f"{name} to resume")
    stopped = stopped_at(runs.said(name), reason)
    assert 3 <= stopped < ITERATIONS
    runs.wait_for_iteration(name, stopped + 1)
    runs.kill_a_rank(name)
    runs.ended(job, name, restarts=1)
    first, second = runs.resumed(name)
    assert first == stopped and second in (stopped, 25, 50)


def stopped_at(said, *reasons):
    """The iteration at which rank 0 says that it stopped, for one of these reasons."""
    whole = tuple(f"stopped by {reason} after" for reason in reasons)
    found = [line for line in said.splitlines() if any(words in line for words in whole)]
    assert len(found) == 1, said[-4000:]
    (line,) = found
    return int(line.partition(" after ")[2].split()[0])


def test_several_nodes_are_preempted_then_lose_a_rank_and_end_with_the_same_bits(runs, uninterrupted):
    """A job of a partition with a higher priority takes both nodes: SIGTERM to the ranks and to torchrun."""
    job = runs.submit("preempted", "several_nodes.sbatch", "--gpus-per-node=1", RANKS_PER_NODE="1")
    runs.wait_for_iteration("preempted", 3)
    options = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    runs.cluster.command("sbatch", *options)
    loses_a_rank_when_it_is_back(runs, job, "preempted", "SIGTERM")
    assert "stopped by preemption" in (runs.folder / "preempted.log").read_text()
    assert_same_run(runs, "preempted", uninterrupted)


def test_a_task_per_rank_is_warned_of_its_time_limit_then_loses_a_rank_and_ends_with_the_same_bits(
    runs, uninterrupted
):
    """SIGUSR1 to the batch shell, as `--signal=B:USR1@300` sends it, and once more while the ranks save."""
    job = runs.submit("warned", "task_per_rank.sbatch", "--gpus-per-node=1", "--ntasks-per-node=1")
    runs.wait_for_iteration("warned", 3)
    for _ in range(2):
        runs.cluster.command("scancel", "--batch", "--signal=USR1", str(job))
    loses_a_rank_when_it_is_back(runs, job, "warned", "SIGUSR1")
    assert_same_run(runs, "warned", uninterrupted)


def test_a_job_whose_node_is_lost_comes_back_and_ends_with_the_same_bits(runs, uninterrupted):
    """Everything on a node ends at once: SLURM's daemon and steps there, torchrun, the rank. The node is back later."""
    job = runs.submit("orphaned", "several_nodes.sbatch", "--gpus-per-node=1", RANKS_PER_NODE="1")
    runs.wait_for_iteration("orphaned", 27)  # after the first checkpoint
    runs.cluster.lose("n2")
    runs.until(lambda: runs.cluster.field(job, "Restarts") == "1", "the job to be requeued")
    runs.cluster.bring_back("n2")
    runs.ended(job, "orphaned", restarts=1)
    assert runs.resumed("orphaned") in ([25], [50])
    assert_same_run(runs, "orphaned", uninterrupted)


def test_a_cancelled_job_saves_and_stays_cancelled(runs):
    job = runs.submit(
        "cancelled", "one_node.sbatch", "--gpus-per-node=2", RANKS_PER_NODE="2",
        arguments=("--train.train_iters=5000", "--train.eval_iters=0"),
    )  # fmt: skip
    runs.wait_for_iteration("cancelled", 3)
    runs.cluster.command("scancel", str(job))
    runs.ended(job, "cancelled", restarts=0, state="CANCELLED")
    # SLURM sends SIGTERM to the ranks and to the script, which passes SIGUSR1 on: either may come first.
    saved = stopped_at(runs.said("cancelled"), "SIGTERM", "SIGUSR1")
    names = [path.name for path in complete_checkpoints(runs.folder / "cancelled" / "checkpoints")]
    planned = range(25, saved, 25)  # some, if scancel came late
    assert names == [f"iter_{iteration:07d}" for iteration in (*planned, saved)]
