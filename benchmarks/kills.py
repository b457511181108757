"""Is anything lost when ranks are killed? `python -m benchmarks.kills [--kills 20] [--in-save 10] [--nvfp4]`

A small FP8 run (delayed scaling, data parallel over two ranks, sharded optimizer, a checkpoint every other iteration; or
NVFP4, tensor parallel, its last third with forwards in BF16) under `torchrun --max-restarts`. Ranks are killed with
SIGKILL at random moments: while starting, anywhere in training, and, as often as --in-save says, between the first byte
and the commit of a save. After each kill the run must restart from the newest checkpoint that was complete when the last
rank was gone, and in time. At the end every loss, every validation and every tensor of the last checkpoint must equal,
bit for bit, those of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.common import environment, table, write_results
from benchmarks.support.forking_interpreter import stood_for
from megatron_fp8.files.checkpoint import complete_checkpoints, latest_checkpoint, read_metadata, read_tensor

ROOT = Path(__file__).parents[1]
MEASURED = ("tokens_per_s", "peak_memory")
LIMIT_S = 120.0
"""A restart that takes longer than this to its first new iteration hangs."""
FINISH_S = 1200.0
"""A run that takes longer than this to its end hangs."""
NVFP4 = (
    "--model.fp8=null", "--model.fp4=e2m1",
    "--model.tensor_model_parallel_size=2", "--model.sequence_parallel=true",
    "--model.fp8_high_precision_healing=0.33", '--model.fp8_high_precision_healing_parts=["*:fprop"]',
)  # fmt: skip
START_S = {True: 6.0, False: 1.0}
"""While ranks start, imports included, or forked from a process that has imported all."""


@dataclass
class Kill:
    """One kill and what became of the run."""

    moment: str
    """'save', 'anywhere' or 'starting', as was meant."""
    rank: int
    bytes_in_save: int
    """Written by a save that was under way and was never committed; 0: no save was."""
    complete: int
    """The iteration of the newest complete checkpoint when all ranks were gone."""
    seen: int
    """How many attempts had gone on from a checkpoint by then."""
    gone_s: float
    """Seconds from the kill until all ranks were gone."""
    resumed: int | None = None
    """The iteration from which the next attempt went on; None: it was killed before it got so far."""


class Run:
    """A run under torchrun, watched from outside. Use as a context manager: whatever happens, all processes end."""

    def __init__(
        self,
        folder: Path,
        config: Path,
        name: str,
        restarts: int,
        python: str = sys.executable,
        resume: str | Path = "auto",
        options: Sequence[str] = (),
    ) -> None:
        self.folder, self.log = folder / name, folder / f"{name}.log"
        self.checkpoints = self.folder / "checkpoints"
        self.leftovers: set[str] = set()
        self.start_s = START_S[python == sys.executable]
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [f"--max-restarts={restarts}", "-m", "megatron_fp8", "train"]
        command += [f"--config={config}", f"--run_dir={self.folder}", f"--resume={resume}", *options]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TORCHELASTIC"))}
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.log.write_bytes(b"")
        with self.log.open("ab") as out:  # as forked ranks write to it, behind what is there
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env={**clean, **variables})

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # first, so that it starts no more ranks
        for pid in self.ranks().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ranks(self) -> dict[int, int]:
        """Process ids of the living ranks, by rank; of forked ones themselves, not of what stands for them."""
        found, forked = {}, stood_for()
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                variables = (entry / "environ").read_bytes()
                rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", variables)
                if rank and str(self.folder).encode() in (entry / "cmdline").read_bytes():
                    found[int(rank[1])] = forked.get(int(entry.name), int(entry.name))
        return found

    def resumed(self) -> list[int]:
        """From which iteration each attempt went on that got so far."""
        return [int(n) for n in re.findall(r"^resume .*iteration (\d+) is done", self.log.read_text(), re.M)]

    def iterates_again(self, seen: int) -> bool:
        """Whether an attempt after the first `seen` that went on from a checkpoint has done an iteration."""
        parts = re.split(r"^resume ", self.log.read_text(), flags=re.M)
        return len(parts) > seen + 1 and re.search(r"^iteration ", parts[-1], re.M) is not None

    def complete(self) -> int:
        """The iteration of the newest complete checkpoint; 0 if there is none."""
        latest = latest_checkpoint(self.checkpoints)
        return int(latest.name.partition("_")[2]) if latest else 0

    def bytes_in_save(self) -> int:
        """What a save that is under way has written; what killed ones left does not count."""
        total = 0
        for folder in self.saves() - self.leftovers:
            with suppress(OSError):
                total += sum(path.stat().st_size for path in (self.checkpoints / folder).iterdir())
        return total

    def saves(self) -> set[str]:
        """Folders of saves that are not committed (old checkpoints that are being removed have other names)."""
        pattern = re.compile(r"\.saving-iter_\d+-[0-9a-f]{8}")
        with suppress(OSError):
            return {name for name in os.listdir(self.checkpoints) if pattern.fullmatch(name)}
        return set()

    def until(self, holds: Callable[[], Any], what: str, pause: float = 0.02) -> None:
        """Wait; RuntimeError if the run ends first, or LIMIT_S pass."""
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                state = "ended" if ended else f"hung for {LIMIT_S:.0f} s"
                raise RuntimeError(f"the run {state} before {what}:\n{self.log.read_text()[-6000:]}")
            time.sleep(pause)


def disturb(run: Run, moments: list[str], dice: random.Random) -> list[Kill]:
    """Kill a rank at each of `moments` (the first is not 'starting'), and see how the run goes on."""
    kills: list[Kill] = []
    run.until(run.complete, "its first checkpoint")
    for moment in moments:
        seen = kills[-1].seen if kills else -1
        if moment == "starting":
            run.until(lambda: len(run.ranks()) == 2, "its ranks started again")
            time.sleep(dice.uniform(0.0, run.start_s))
        else:
            run.until(partial(run.iterates_again, seen), "it iterated again")
        if moment == "anywhere":
            time.sleep(dice.uniform(0.0, 1.0))
        elif moment == "save":
            for _ in range(dice.randint(1, 3)):  # one of the next saves
                run.until(lambda: not run.bytes_in_save(), "a save's end", 0.0005)
                run.until(run.bytes_in_save, "a save", 0.0005)
            time.sleep(dice.choice((0.0, 0.002, 0.01, 0.03)))
        kills.append(_kill(run, moment, dice.randrange(2)))
    run.until(lambda: run.iterates_again(kills[-1].seen), "it iterated again")
    for kill in kills:
        later = [other for other in kills if other.seen == kill.seen]
        kill.resumed = run.resumed()[kill.seen] if kill is later[-1] else None
    return kills


def _kill(run: Run, moment: str, rank: int) -> Kill:
    victims, written, before = run.ranks(), run.bytes_in_save(), run.complete()
    killed = time.monotonic()
    os.kill(victims[rank], signal.SIGKILL)
    run.until(
        lambda: not set(victims.values()) & set(run.ranks().values()), "all of the attempt's ranks were gone"
    )
    complete, run.leftovers = run.complete(), run.saves()
    return Kill(
        moment,
        rank,
        written if complete == before else 0,
        complete,
        len(run.resumed()),
        time.monotonic() - killed,
    )


def finish(run: Run) -> None:
    """Wait for a run's own end."""
    code = run.process.wait(FINISH_S)
    if code:
        raise RuntimeError(f"the run ended with exit code {code}:\n{run.log.read_text()[-6000:]}")


def differences(one: Path, other: Path) -> list[str]:
    """What two runs recorded differently, and which tensors of their last checkpoints differ."""
    found = []
    for name in ("metrics.jsonl", "validation.jsonl"):
        records = [_records(folder / name) for folder in (one, other)]
        found += [name] if records[0] != records[1] or not records[0] else []
    last = [complete_checkpoints(folder / "checkpoints")[-1] for folder in (one, other)]
    tensors = [_tensors(folder) for folder in last]
    if last[0].name != last[1].name or tensors[0].keys() != tensors[1].keys():
        return [*found, f"{last[0].name} and {last[1].name} do not hold the same tensors"]
    return found + [key for key, value in tensors[0].items() if not torch.equal(value, tensors[1][key])]


def _records(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, random streams too, as bytes."""
    metadata = read_metadata(folder)
    values = {key: read_tensor(folder, metadata, key) for key in metadata.state_dict_metadata}
    return {key: value.contiguous().view(-1).view(torch.uint8) for key, value in values.items()}


def write_config(folder: Path, iterations: int, asynchronous: bool) -> Path:
    """The run's config and its text."""
    words = random.Random(0).choices(["spam", "eggs", "ham", "toast", "tea", "\n"], k=60_000)
    (folder / "text.txt").write_text(" ".join(words))
    content = {
        "model": {
            "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128,
            "add_bias_linear": False, "hidden_dropout": 0.1, "attention_dropout": 0.0,
            "fp8": "hybrid", "fp8_recipe": "delayed",
        },
        "train": {
            "train_iters": iterations, "micro_batch_size": 2, "global_batch_size": 4, "seq_length": 64,
            "eval_interval": 25, "eval_iters": 1, "log_interval": 1, "threads": 1,
        },
        "optimizer": {"lr": 0.01, "use_distributed_optimizer": True},
        "data": {"paths": [str(folder / "text.txt")], "split": "80,20,0", "cache_dir": str(folder / "cache")},
        "checkpoint": {"save_interval": 2, "async_save": asynchronous},
    }  # fmt: skip
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def choose_moments(kills: int, in_save: int, dice: random.Random) -> list[str]:
    """`in_save` times 'save', the rest half 'anywhere' and half 'starting', shuffled; the first is not 'starting'."""
    rest = ["anywhere", "starting"] * kills
    moments = ["save"] * in_save + rest[: kills - in_save]
    dice.shuffle(moments)
    while moments[0] == "starting":
        moments.append(moments.pop(0))
    return moments


def play(
    folder: Path,
    moments: list[str],
    iterations: int,
    dice: random.Random,
    asynchronous: bool = False,
    python: str = sys.executable,
    options: Sequence[str] = (),
) -> tuple[list[Kill], list[str]]:
    """A run with kills at `moments`, then one without: the kills, and in what the two differ."""
    config = write_config(folder, iterations, asynchronous)
    with Run(folder, config, "killed", len(moments), python, options=options) as killed:
        kills = disturb(killed, moments, dice)
        finish(killed)
    with Run(folder, config, "whole", 0, python, options=options) as whole:
        finish(whole)
    return kills, differences(killed.folder, whole.folder)


def lost(kill: Kill) -> bool:
    """Whether the attempt after a kill did not go on from the newest complete checkpoint."""
    return kill.resumed is not None and kill.resumed != kill.complete


def main() -> int:
    """Kill, compare, tabulate; exit code 1 if anything was lost, differs, or was not killed as asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="default %(default)s")
    parser.add_argument(
        "--in-save", type=int, default=10, help="of these, inside a save (default %(default)s)"
    )
    parser.add_argument("--iterations", type=int, default=400, help="of the run (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default %(default)s)")
    parser.add_argument("--async-save", action="store_true", help="checkpoints are written by a thread")
    parser.add_argument("--nvfp4", action="store_true", help="the run is NVFP4 and tensor parallel")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/kills.*")
    args = parser.parse_args()
    dice = random.Random(args.seed)
    moments = choose_moments(args.kills, args.in_save, dice)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        options = NVFP4 if args.nvfp4 else ()
        kills, different = play(
            Path(folder), moments, args.iterations, dice, args.async_save, options=options
        )
    rows = [
        [
            str(number),
            kill.moment,
            str(kill.rank),
            f"{kill.bytes_in_save:,}" if kill.bytes_in_save else "",
            f"{kill.gone_s:.1f}",
            str(kill.complete),
            "killed again" if kill.resumed is None else str(kill.resumed),
        ]
        for number, kill in enumerate(kills, start=1)
    ]
    inside = sum(kill.bytes_in_save > 0 for kill in kills)
    verdict = (
        f"{len(kills)} kills, {inside} of them between the first byte and the commit of a save; "
        f"{sum(map(lost, kills))} times something was lost; after {args.iterations} iterations "
        + (f"these differ from the undisturbed run: {', '.join(different)}" if different else
           "every loss, validation and tensor equals the undisturbed run's, bit for bit")
    )  # fmt: skip
    header = ["kill", "moment", "rank", "bytes of the save lost", "all gone, s", "complete", "resumed from"]
    body = f"{table(header, rows)}\n\n{verdict}"
    print(body)
    if args.write:
        record = {**environment(["megatron-core"]), "measured": f"{time.monotonic() - start:.0f} s in all"}
        name = "kills" + "_async" * args.async_save + "_nvfp4" * args.nvfp4
        command = " ".join(["python -m benchmarks.kills", *sys.argv[1:]])
        write_results(
            name, "Ranks killed at random moments", command, record, body, [asdict(k) for k in kills]
        )
    return int(bool(different) or any(map(lost, kills)) or inside < min(6, args.in_save))


if __name__ == "__main__":
    raise SystemExit(main())
