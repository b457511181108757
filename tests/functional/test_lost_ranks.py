"""Ranks and clocks in trouble: what is said, what it ends with, and that nothing is computed otherwise.

docs/reliability.md lists them all.
"""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.command import MEASURED, ROOT, environment, lines
from tests.support.ports import held_ports

pytestmark = pytest.mark.timeout(600)

TROUBLE = str(ROOT / "tests" / "support" / "disturbed_train.py")
ITERATIONS = 26
MORE = [f"--train.train_iters={ITERATIONS}", "--train.eval_iters=0"]
SLURM = {"SLURM_JOB_START_TIME": str(time.time()), "SLURM_JOB_END_TIME": str(time.time() + 3600)}


class Ranks:
    """The ranks of a run, without torchrun: rank 0 keeps the store. `said[rank]` is what each wrote, once all ended."""

    def __init__(self, folder, python, told, *arguments, count=2, **variables):
        self._ports = held_ports(1)
        (port,) = self._ports.__enter__()
        folder.mkdir(parents=True)
        self.logs = [folder / f"{rank}.log" for rank in range(count)]
        self.processes = []
        told = told | {"log": str(self.logs[0])}
        for rank, log in enumerate(self.logs):
            env = environment(
                RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(count),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **variables,
            )  # fmt: skip
            command = [python, TROUBLE, json.dumps(told), "train", *map(str, arguments)]
            with log.open("wb") as out:
                self.processes.append(subprocess.Popen(command, stdout=out, stderr=out, env=env))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
        self._ports.__exit__(None, None, None)

    def wait(self, rank, timeout=240):
        return self.processes[rank].wait(timeout)

    @property
    def said(self):
        return [log.read_text() for log in self.logs]


def metrics(folder):
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def troubled(folder, config, forking_python):
    """A run with every trouble that it outlives: its folder, and what its ranks said."""
    told = {"clock": True, "slow": 0.5, "hangs": 22, "compiles": 24, "stops": 26}
    out = folder / "runs" / "troubled"
    options = [f"--config={config}", f"--run_dir={out}", "--train.watchdog=1", *MORE]
    with Ranks(folder / "troubled", forking_python, told, *options, **SLURM) as ranks:
        assert [ranks.wait(0), ranks.wait(1)] == [0, 0], ranks.said
        return out, ranks.said


def test_what_ranks_outlive_changes_no_bit(troubled, folder, config, forking_python):
    """A clock that jumps neither: the job's time limit is an hour away, and the clock jumps by weeks."""
    whole = folder / "runs" / "whole"
    options = [f"--config={config}", f"--run_dir={whole}", "--train.watchdog=0", *MORE]
    with Ranks(folder / "whole", forking_python, {}, *options) as ranks:
        assert [ranks.wait(0), ranks.wait(1)] == [0, 0], ranks.said
        assert "waiting" not in "".join(ranks.said) and not (whole / "stacks").exists()
    assert len(metrics(whole)) == ITERATIONS and metrics(whole) == metrics(troubled[0])


def test_a_slow_rank_is_named_with_its_delay(troubled):
    (first, last) = troubled[1]
    assert "is slow" not in first
    said = re.findall(
        r"^warning: rank 1 on \S+ is slow: it works \S+ s an iteration .* all wait (\S+) s", last, re.M
    )
    assert said and float(said[0]) > 0.2, last


def test_a_rank_that_hangs_is_named_and_where_it_is(troubled):
    out, (said, other) = troubled
    line = re.search(
        r"^waiting     iteration 22 takes .*: rank 1 works in iteration 22: \S*trouble\.py:\d+ \(read_slowly\);"
        r" rank 0 waits in iteration 22: .* Stacks: (.*)$",
        said,
        re.M,
    )
    assert line, said
    assert "waiting     iteration 22" not in other
    assert re.search(r"^iteration 22 went on after \d+ s$", said, re.M), said
    folder = Path(line[1])
    assert folder in set((out / "stacks").glob("*/iteration-22-step-*"))
    records = [json.loads((folder / f"rank-{rank}.txt").read_text().partition("\n")[0]) for rank in range(2)]
    assert [record["kind"] for record in records] == ["waits", "elsewhere"]
    stacks = (folder / "rank-1.txt").read_text()
    assert "in read_slowly" in stacks and "'watchdog'" in stacks and "collectives begun" in stacks


def test_a_rank_that_compiles_is_waited_for_in_silence(troubled):
    out, said = troubled
    assert list((out / "stacks").glob("*/iteration-24-*")) and "iteration 24 takes" not in "".join(said)


def test_a_rank_that_was_stopped_says_so(troubled):
    said, other = troubled[1]
    assert re.search(
        r"^waiting     iteration 26 takes .*: rank 1 does not answer: it is stopped, dead or", said, re.M
    )
    assert re.search(r"^warning: rank 1 on \S+ stood still for \d+ s: it was stopped", other, re.M), other


def test_four_ranks_of_two_stages_name_the_one_that_hangs_and_the_one_that_is_slow(
    folder, config, forking_python
):
    """Here waiting is normal: for the other stage's messages, for tensor parallel ranks, in a validation, in a save.

    The first iterations may take 20 times `train.watchdog`.
    """
    told = {"slow": 0.5, "inside": {"batch": 1, "forward": 22, "validation": 24, "save": 26}}
    layout = ["--model.tensor_model_parallel_size=2", "--model.pipeline_model_parallel_size=2"]
    phases = [
        "--train.eval_iters=1",
        "--train.eval_interval=4",
        "--checkpoint.save_interval=6",
        "--train.watchdog=1",
    ]
    out = f"--run_dir={folder / 'runs' / 'four'}"
    options = [f"--config={config}", f"--train.train_iters={ITERATIONS}", out, *layout, *phases]
    with Ranks(folder / "four", forking_python, told, *options, count=4) as ranks:
        assert [ranks.wait(rank) for rank in range(4)] == [0] * 4, ranks.said
        said = ranks.said
    for words in ("iteration 22", r"iteration 24 \(validation\)", r"iteration 26 \(save\)"):
        (line, *_) = re.findall(f"^waiting     {words} takes .*rank 3 works.*$", said[0], re.M)
        assert re.search(rf": rank 3 works in {words}: \S*trouble\.py:\d+ \(read_slowly\); ", line), line
        assert all(re.search(rf"\b{rank}\b[^;:]* waits? in {words}: ", line) for rank in range(3)), line
    (line, *_) = re.findall("^waiting     iteration 1 takes .*$", said[0], re.M)
    assert int(line.split()[4]) >= 20
    assert re.search(r": rank 3 works in iteration 1: \S*trouble\.py:\d+ \(read_slowly\); ", line), line
    assert re.search(r"^iteration 1 went on after \d+ s$", said[0], re.M)
    assert [rank for rank in range(4) if " is slow: it works " in said[rank]] == [3]
    assert "or its pipeline stage has more to do than others" in said[3]


def test_a_rank_that_is_killed_ends_the_others_with_1_and_a_line(folder, config, forking_python):
    out = folder / "runs" / "killed"
    options = [f"--config={config}", f"--run_dir={out}", "--checkpoint.save_interval=2", *MORE]
    with Ranks(folder / "killed", forking_python, {"dies": 4}, *options) as ranks:
        assert (ranks.wait(1), ranks.wait(0)) == (-signal.SIGKILL, 1), ranks.said
        said = ranks.said[0]
    assert "Traceback" not in said
    (line,) = re.findall("^error: .*$", said, re.M)
    assert "training failed: iteration 4: the connection to another rank was lost (" in line
    assert line.endswith(f"--resume=auto goes on from {out / 'checkpoints' / 'iter_0000002'}.")


def test_a_rank_that_stays_stopped_ends_the_others_when_a_collective_gives_up(folder, config, forking_python):
    """Rank 0, which keeps the store where ranks would tell each other of a failure."""
    out = folder / "runs" / "stopped"
    options = [
        f"--config={config}",
        f"--run_dir={out}",
        "--train.watchdog=1",
        "--train.distributed_timeout_minutes=1",
    ]
    told = {"leaves": [0, 5], "minute": 8}
    with Ranks(folder / "stopped", forking_python, told, *options, *MORE) as ranks:
        assert ranks.wait(1) == 1, ranks.said
        said = ranks.said[1]
        assert ranks.processes[0].poll() is None
    assert "Traceback" not in said
    assert re.search(r"^waiting     iteration 5 takes .*: rank 0 does not answer", said, re.M), said
    (line,) = re.findall("^error: .*$", said, re.M)
    assert "iteration 5: other ranks did not come in time (" in line
    assert (
        "rank 0 does not answer: it is stopped, dead or cut off. --resume=auto starts from the beginning"
        in line
    )


def test_a_rank_that_is_stopped_before_the_first_step(folder, config, forking_python):
    """Gloo's own words were all that was said, and the exit code was that of bad input."""
    options = [
        f"--config={config}",
        f"--run_dir={folder / 'runs' / 'early'}",
        "--train.watchdog=1",
        "--train.distributed_timeout_minutes=1",
    ]
    with Ranks(folder / "early", forking_python, {"early": True, "minute": 8}, *options, *MORE) as ranks:
        assert ranks.wait(0) == 1, ranks.said
        said = ranks.said[0]
    assert re.search(
        r"^waiting     the start takes .*: rank 1 does not answer: it is stopped, dead", said, re.M
    )
    (line,) = re.findall("^error: .*$", said, re.M)
    assert (
        line.startswith("error: before the first step other ranks did not come in time (")
        and "Traceback" not in said
    )
