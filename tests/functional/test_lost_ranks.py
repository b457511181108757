"""Ranks and clocks in trouble: what is said, what it ends with, and that nothing is computed otherwise.

docs/reliability.md lists them all.
"""

import json
import re
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.command import MEASURED, ROOT, environment, lines
from tests.support.ports import held_ports

pytestmark = pytest.mark.timeout(600)

PROGRAM = str(ROOT / "tests" / "support" / "disturbed_train.py")
ITERATIONS = 16
MORE = [f"--train.train_iters={ITERATIONS}", "--train.eval_iters=0"]
SLURM = {"SLURM_JOB_START_TIME": str(time.time()), "SLURM_JOB_END_TIME": str(time.time() + 3600)}


class Ranks:
    """The ranks of a run, without torchrun: rank 0 keeps the store. `said[rank]` is what each wrote, once all ended."""

    def __init__(self, folder, python, faults, *arguments, count=2, **variables):
        self._ports = held_ports(1)
        (port,) = self._ports.__enter__()
        folder.mkdir(parents=True)
        self.logs = [folder / f"{rank}.log" for rank in range(count)]
        self.processes = []
        faults = faults | {"log": str(self.logs[0])}
        for rank, log in enumerate(self.logs):
            env = environment(
                RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(count),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **variables,
            )  # fmt: skip
            command = [python, PROGRAM, json.dumps(faults), "train", *map(str, arguments)]
            with log.open("wb") as out:
                self.processes.append(subprocess.Popen(command, stdout=out, stderr=out, env=env))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
        self._ports.__exit__(None, None, None)

    def codes(self, *ranks, timeout=240):
        """Exit codes; an error with what all ranks wrote if one does not end."""
        deadline = time.monotonic() + timeout
        try:
            return [self.processes[rank].wait(max(0.0, deadline - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            pytest.fail(f"a rank of {ranks} still runs after {timeout} s:\n" + "\n".join(self.said))

    @property
    def said(self):
        return [log.read_text() for log in self.logs]


def metrics(folder):
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def disturbed(folder, config, forking_python):
    """A run with every fault that it outlives: its folder, and what its ranks said."""
    faults = {"clock": True, "slow": 0.4, "hangs": 12, "compiles": 14, "stops": 16}
    out = folder / "runs" / "disturbed"
    options = [f"--config={config}", f"--run_dir={out}", "--train.watchdog=1", *MORE]
    with Ranks(folder / "disturbed", forking_python, faults, *options, **SLURM) as ranks:
        assert ranks.codes(0, 1) == [0, 0], ranks.said
        return out, ranks.said


def test_what_ranks_outlive_changes_no_bit(disturbed, folder, config, forking_python):
    """A clock that jumps neither: the job's time limit is an hour away, and the clock jumps by weeks."""
    whole = folder / "runs" / "whole"
    options = [f"--config={config}", f"--run_dir={whole}", "--train.watchdog=0", *MORE]
    with Ranks(folder / "whole", forking_python, {}, *options) as ranks:
        assert ranks.codes(0, 1) == [0, 0], ranks.said
        assert "waiting" not in "".join(ranks.said) and not (whole / "stacks").exists()
    assert len(metrics(whole)) == ITERATIONS and metrics(whole) == metrics(disturbed[0])


def test_a_slow_rank_is_named_with_its_delay(disturbed):
    (first, last) = disturbed[1]
    assert "is slow" not in first
    said = re.findall(
        r"^warning: rank 1 on \S+ is slow: it works \S+ s an iteration .* all wait (\S+) s", last, re.M
    )
    assert said and float(said[0]) > 0.2, last


def test_a_rank_that_hangs_is_named_and_where_it_is(disturbed):
    out, (said, other) = disturbed
    line = re.search(
        r"^waiting     iteration 12 takes .*: rank 1 works in iteration 12: \S*disturbed_train\.py:\d+ \(read_slowly\);"
        r" rank 0 waits in iteration 12: .* Stacks: (.*)$",
        said,
        re.M,
    )
    assert line, said
    assert "waiting     iteration 12" not in other
    assert re.search(r"^iteration 12 went on after \d+ s$", said, re.M), said
    folder = Path(line[1])
    assert folder in set((out / "stacks").glob("*/iteration-12-step-*"))
    records = [json.loads((folder / f"rank-{rank}.txt").read_text().partition("\n")[0]) for rank in range(2)]
    assert [record["kind"] for record in records] == ["waits", "elsewhere"]
    stacks = (folder / "rank-1.txt").read_text()
    assert "in read_slowly" in stacks and "'watchdog'" in stacks and "collectives begun" in stacks


def test_a_rank_that_compiles_is_waited_for_in_silence(disturbed):
    out, said = disturbed
    assert list((out / "stacks").glob("*/iteration-14-*")) and "iteration 14 takes" not in "".join(said)


def test_a_rank_that_was_stopped_says_so(disturbed):
    said, other = disturbed[1]
    assert re.search(
        r"^waiting     iteration 16 takes .*: rank 1 does not answer: it is stopped, dead or", said, re.M
    )
    assert re.search(r"^warning: rank 1 on \S+ stood still for \d+ s: it was stopped", other, re.M), other


def test_four_ranks_of_two_stages_name_the_one_that_hangs_and_the_one_that_is_slow(
    folder, config, forking_python
):
    """Here waiting is normal: for the other stage's messages, for tensor parallel ranks, in a validation, in a save."""
    faults = {"slow": 0.4, "inside": {"forward": 12, "validation": 14, "save": 16}}
    options = [
        f"--config={config}", f"--run_dir={folder / 'runs' / 'four'}", f"--train.train_iters={ITERATIONS}",
        "--model.tensor_model_parallel_size=2", "--model.pipeline_model_parallel_size=2", "--train.watchdog=1",
        "--train.eval_iters=1", "--train.eval_interval=2", "--checkpoint.save_interval=4",
    ]  # fmt: skip
    with Ranks(folder / "four", forking_python, faults, *options, count=4) as ranks:
        assert ranks.codes(*range(4)) == [0] * 4, ranks.said
        said = ranks.said
    for words in ("iteration 12", r"iteration 14 \(validation\)", r"iteration 16 \(save\)"):
        (line, *_) = re.findall(f"^waiting     {words} takes .*rank 3 works.*$", said[0], re.M)
        assert re.search(rf": rank 3 works in {words}: \S*disturbed_train\.py:\d+ \(read_slowly\); ", line), (
            line
        )
        assert all(re.search(rf"\b{rank}\b[^;:]* waits? in {words}: ", line) for rank in range(3)), line
        assert re.search(rf"^{words} went on after \d+ s$", said[0], re.M)
    assert [rank for rank in range(4) if " is slow: it works " in said[rank]] == [3]
    assert "or its pipeline stage has more to do than others" in said[3]


@pytest.fixture(scope="module")
def lost(folder, config, forking_python):
    """Runs of which a rank is lost, each with other ranks than the others: what the surviving rank said.

    They run at once, since they wait most of the time. Of each, the lost rank is ended with the run.
    """
    short = ["--train.watchdog=1", "--train.distributed_timeout_minutes=1"]
    cases = {  # faults, options, the rank that survives
        "killed": ({"dies": 4}, ["--checkpoint.save_interval=2"], 0),
        # Rank 0, which keeps the store where ranks would tell each other of a failure.
        "stopped": ({"leaves": [0, 5], "minute": 12}, short, 1),
        "early": ({"early": True, "minute": 12}, short, 0),
    }
    said = {}
    with ExitStack() as stack:
        runs = {}
        for name, (faults, options, _) in cases.items():
            options = [f"--config={config}", f"--run_dir={folder / 'runs' / name}", *options, *MORE]
            runs[name] = stack.enter_context(Ranks(folder / name, forking_python, faults, *options))
        for name, (*_, survivor) in cases.items():
            assert runs[name].codes(survivor) == [1], runs[name].said
            said[name] = runs[name].said[survivor]
            assert "Traceback" not in said[name]
        assert runs["killed"].codes(1) == [-signal.SIGKILL]
        assert runs["stopped"].processes[0].poll() is None
    return said


def test_a_rank_that_is_killed_ends_the_others_with_1_and_a_line(lost, folder):
    (line,) = re.findall("^error: .*$", lost["killed"], re.M)
    assert "training failed: iteration 4: the connection to another rank was lost (" in line
    checkpoint = folder / "runs" / "killed" / "checkpoints" / "iter_0000002"
    assert line.endswith(f"--resume=auto goes on from {checkpoint}.")


def test_a_rank_that_stays_stopped_ends_the_others_when_a_collective_gives_up(lost):
    said = lost["stopped"]
    assert re.search(r"^waiting     iteration 5 takes .*: rank 0 does not answer", said, re.M), said
    (line,) = re.findall("^error: .*$", said, re.M)
    assert "iteration 5: other ranks did not come in time (" in line
    silent = "rank 0 does not answer: it is stopped, dead or cut off. --resume=auto starts from the beginning"
    assert silent in line


def test_a_rank_that_is_stopped_before_the_first_step(lost):
    """Gloo's own words were all that was said, and the exit code was that of bad input."""
    said = lost["early"]
    assert re.search(
        r"^waiting     the start takes .*: rank 1 does not answer: it is stopped, dead", said, re.M
    )
    (line,) = re.findall("^error: .*$", said, re.M)
    assert line.startswith("error: before the first step other ranks did not come in time (")
