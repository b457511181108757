"""Does a long run that is disturbed all the time end as if nothing had been? `python -m benchmarks.soak [--write]`

2,000 iterations of a small FP8 GPT (examples/configs/tiny_gpt_cpu.yaml, which would take an hour, made narrower: two
layers of 64 channels, delayed scaling, dropout, a sharded optimizer on two data-parallel ranks, a checkpoint every ten
iterations), and a fault every fifty on average, drawn with a
fixed seed from those after which a run goes on exactly:

    kill       a rank is killed (SIGKILL)
    save       so is one between the first byte of a save and its commit
    starting   and one while ranks start
    stop       SIGTERM to torchrun: the run saves and ends
    notice     SIGUSR1 to one rank: the same
    pause      a rank stands still for a second (SIGSTOP) and goes on
    damage     a rank is killed, and a file of the newest checkpoint changed, cut off or removed: the next start must
               refuse it (exit code 2) and name another one, from which it is started again
    unnamed    a rank is killed, and the file `latest` is gone

At the end every loss, every validation and every tensor of the last checkpoint must equal, bit for bit, those of a run
that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import environment, table, write_results
from benchmarks.kills import LIMIT_S, ROOT, Run, differences, finish
from benchmarks.support.forking_interpreter import forking_python
from megatron_fp8.files.checkpoint import LATEST, complete_checkpoints

KINDS = ("kill", "save", "starting", "stop", "notice", "pause", "damage", "unnamed")


@dataclass
class Fault:
    """One fault and what came of it.

    Attributes:
        kind: of KINDS.
        iteration: the last one on record when it struck.
        resumed: from which iteration the run went on; None: it was not interrupted.
        how: what was done to a file, and the exit code of the start that refused it; else ''.
    """

    kind: str
    iteration: int
    resumed: int | None = None
    how: str = ""


def write_config(folder: Path, iterations: int, save_every: int) -> Path:
    """The run's config and its text."""
    words = random.Random(0).choices(["spam", "eggs", "ham", "toast", "tea", "\n"], k=60_000)
    (folder / "text.txt").write_text(" ".join(words))
    config: dict[str, Any] = yaml.safe_load((ROOT / "examples/configs/tiny_gpt_cpu.yaml").read_text())
    config["model"] |= {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_query_groups": 2, "kv_channels": 32,
        "ffn_hidden_size": 128, "hidden_dropout": 0.1, "fp8_recipe": "delayed", "first_last_layers_bf16": False,
        "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max", "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
    }  # fmt: skip
    config["train"] |= {
        "train_iters": iterations, "micro_batch_size": 1, "global_batch_size": 2, "seq_length": 64,
        "eval_interval": max(iterations // 8, 1), "eval_iters": 1, "log_interval": 1, "threads": 1,
    }  # fmt: skip
    config["optimizer"] |= {
        "use_distributed_optimizer": True,
        "lr": 2e-3,
        "lr_warmup_iters": 10 if iterations > 100 else 2,
    }
    data = {"paths": [str(folder / "text.txt")], "split": "80,20,0", "cache_dir": str(folder / "cache")}
    config |= {"data": data, "checkpoint": {"save_interval": save_every, "keep_last": 4}}
    path = folder / "soak.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def draw(iterations: int, every: int, dice: random.Random) -> list[tuple[int, str]]:
    """(iteration, kind) of the faults: gaps are exponential, every kind comes once before any comes twice."""
    found: list[tuple[int, str]] = []
    at, bag = 0.0, list[str]()
    while (at := at + dice.expovariate(1 / every)) < iterations - 2:
        if not bag:
            bag = dice.sample(KINDS, len(KINDS))
        found.append((max(int(at), 1), bag.pop()))
    return found


class Disturbed:
    """A run and its faults. Every attempt is a torchrun of its own.

    Args:
        python: of the attempts; one that forks starts them in a second.
    """

    def __init__(self, folder: Path, config: Path, dice: random.Random, python: str) -> None:
        self.folder, self.config, self.dice, self.python = folder, config, dice, python
        self.faults: list[Fault] = []
        self._resume: str | Path = "auto"

    def play(self, planned: list[tuple[int, str]]) -> Path:
        """Train to the end with these faults; the run's folder. RuntimeError if the run does otherwise than it must."""
        waiting = list(planned)
        while True:
            with self._attempt() as run:
                if self._refused(run):
                    continue
                if not waiting:
                    _wait(run, None)
                    finish(run)
                    self._note(run)
                    return run.folder
                self._strike(run, waiting)

    def _attempt(self) -> Run:
        return Run(self.folder, self.config, "disturbed", 0, self.python, self._resume)

    def _refused(self, run: Run) -> bool:
        """Whether the checkpoint to go on from is refused as damaged; the one that is named is next."""
        run.until(lambda: _ended(run) or _begun(run), "it iterated or ended", 0.1)
        said = run.log.read_text()
        other = re.search(r"Another one is complete: (\S+) ", said)
        damaged = re.search(r"^error: .*is (damaged|missing|not)", said, re.M)
        if _begun(run) or not other or not damaged:
            return False
        code = run.process.wait(LIMIT_S)
        last = self.faults[-1]
        last.how += f"; refused: {'exit code 2' if 'exitcode  : 2' in said else f'exit code {code}'}"
        if "exitcode  : 2" not in said:
            raise RuntimeError(f"a damaged checkpoint ended otherwise than refused:\n{said[-4000:]}")
        self._resume = other[1]
        return True

    def _note(self, run: Run) -> None:
        """From where this attempt went on is what became of the fault before it."""
        self._resume = "auto"
        resumed = run.resumed()
        for fault in reversed(self.faults):
            if fault.resumed is not None or fault.kind == "pause":
                break
            fault.resumed = resumed[0] if resumed else 0

    def _strike(self, run: Run, waiting: list[tuple[int, str]]) -> None:
        """The faults that are due in this attempt, to the one that ends it."""
        at, kind = waiting[0]
        if kind == "starting":
            self._kill_starting(run, waiting)
            return
        self._note(run)
        while waiting:
            at, kind = waiting.pop(0)
            _wait(run, at)
            if kind == "pause":
                self._pause(run)
                if waiting and waiting[0][1] != "starting":
                    continue
                if not waiting:
                    _wait(run, None)
                kind = "kill"  # what comes next needs a start
            if _ended(run):
                if kind == "kill" and not waiting:  # after the last pause
                    return
                raise RuntimeError(f"the run ended by itself:\n{run.log.read_text()[-4000:]}")
            self._end_by(run, kind)
            return

    def _kill_starting(self, run: Run, waiting: list[tuple[int, str]]) -> None:
        waiting.pop(0)
        self.faults.append(Fault("starting", _last(run)))
        run.until(lambda: len(run.ranks()) == 2 or _ended(run), "its ranks started")
        time.sleep(self.dice.uniform(0.0, run.start_s))
        self._kill(run)

    def _pause(self, run: Run) -> None:
        rank = run.ranks()[self.dice.randrange(2)]
        self.faults.append(Fault("pause", _last(run)))
        os.kill(rank, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(rank, signal.SIGCONT)

    def _end_by(self, run: Run, kind: str) -> None:
        if kind == "damage":
            run.until(
                lambda: len(complete_checkpoints(run.checkpoints)) > 1 or _ended(run), "two checkpoints"
            )
        elif kind == "save":
            run.until(lambda: run.bytes_in_save() or _ended(run), "a save", 0.0005)
        fault = Fault(kind, _last(run))
        self.faults.append(fault)
        if kind == "stop":
            run.process.send_signal(signal.SIGTERM)
        elif kind == "notice":
            with suppress(ProcessLookupError, KeyError):
                os.kill(run.ranks()[self.dice.randrange(2)], signal.SIGUSR1)
        else:
            self._kill(run)
        run.process.wait(LIMIT_S)
        while run.ranks():
            time.sleep(0.02)
        if kind == "damage":
            fault.how = _damage(complete_checkpoints(run.checkpoints), self.dice)
        elif kind == "unnamed":
            (run.checkpoints / LATEST).unlink(missing_ok=True)

    def _kill(self, run: Run) -> None:
        with suppress(ProcessLookupError, KeyError, IndexError):
            os.kill(self.dice.choice(list(run.ranks().values())), signal.SIGKILL)
        run.process.wait(LIMIT_S)


def _ended(run: Run) -> bool:
    return run.process.poll() is not None


def _begun(run: Run) -> bool:
    return re.search(r"^iteration ", run.log.read_text(), re.M) is not None


def _wait(run: Run, iteration: int | None) -> None:
    """Until this iteration is on record, or, without one, the run has ended. RuntimeError: none comes for LIMIT_S."""
    while (last := _last(run)) < (math.inf if iteration is None else iteration) and not _ended(run):
        run.until(partial(_moved, run, last), f"an iteration after {last}", 0.02)


def _moved(run: Run, last: int) -> bool:
    return _last(run) != last or _ended(run)


def _last(run: Run) -> int:
    """The last iteration on record; 0: none is."""
    with (
        suppress(OSError, ValueError, IndexError, KeyError),
        (run.folder / "metrics.jsonl").open("rb") as lines,
    ):
        lines.seek(max(0, lines.seek(0, os.SEEK_END) - 4096))
        return int(json.loads(lines.read().rpartition(b"\n")[0].splitlines()[-1])["iteration"])
    return 0


def _damage(checkpoints: list[Path], dice: random.Random) -> str:
    """Change a file of the newest of at least two checkpoints; what was done."""
    path = dice.choice(sorted(checkpoints[-1].iterdir()))
    if path.name == "manifest.json":  # a folder without one is named, but not as damaged
        path = checkpoints[-1] / ".metadata"
    how = dice.choice(("one bit", "cut off", "removed"))
    content = bytearray(path.read_bytes())
    if how == "one bit":
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    elif how == "cut off":
        del content[dice.randrange(len(content)) :]
    path.unlink()
    if how != "removed":
        path.write_bytes(content)
    return f"{path.parent.name}/{path.name}: {how}"


def soak(
    folder: Path,
    planned: list[tuple[int, str]],
    iterations: int,
    save_every: int,
    dice: random.Random,
    python: str,
) -> tuple[list[Fault], list[str], dict[str, Any]]:
    """A run with these faults beside one without: the faults, in what the two differ, the last record of both."""
    config = write_config(folder, iterations, save_every)
    disturbed = Disturbed(folder, config, dice, python)
    with Run(folder, config, "whole", 0, python) as whole:
        one = disturbed.play(planned)
        _wait(whole, None)
        finish(whole)
    last = json.loads((one / "metrics.jsonl").read_text().splitlines()[-1])
    return disturbed.faults, differences(one, whole.folder), last


def main() -> int:
    """Disturb, compare, tabulate; exit code 1 if anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=2000, help="of the run (default %(default)s)")
    parser.add_argument("--every", type=int, default=50, help="iterations between faults, on average")
    parser.add_argument("--save-every", type=int, default=10, help="iterations between checkpoints")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (default %(default)s)")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/soak.*")
    args = parser.parse_args()
    dice, start = random.Random(args.seed), time.monotonic()
    planned = draw(args.iterations, args.every, dice)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        (folder / "python").mkdir()
        python = stack.enter_context(forking_python(folder / "python"))
        faults, different, last = soak(folder, planned, args.iterations, args.save_every, dice, python)
    counts = Counter(fault.kind for fault in faults)
    lost = sum(max(f.iteration - f.resumed, 0) for f in faults if f.resumed is not None)
    verdict = (
        f"{len(faults)} faults in {args.iterations} iterations, {lost} iterations done again; "
        + (f"these differ from the undisturbed run: {', '.join(different)}" if different else
           f"the last loss, {last['lm_loss']!r}, every other one, every validation and every tensor of the last"
           " checkpoint equal the undisturbed run's, bit for bit")
    )  # fmt: skip
    rows = [[f.kind, str(f.iteration), "" if f.resumed is None else str(f.resumed), f.how] for f in faults]
    header = ["fault", "at iteration", "went on from", "what was done"]
    times = table(["fault", "times"], [[kind, str(counts[kind])] for kind in KINDS])
    body = f"{times}\n\n{verdict}\n\n{table(header, rows)}"
    print(body)
    if args.write:
        record = {**environment(["megatron-core"]), "measured": f"{time.monotonic() - start:.0f} s in all"}
        command = " ".join(["python -m benchmarks.soak", *sys.argv[1:]])
        write_results(
            "soak", "A run disturbed all the time", command, record, body, [asdict(f) for f in faults]
        )
    return int(bool(different) or not faults)


if __name__ == "__main__":
    raise SystemExit(main())
