"""Runs `megatron-fp8 train` as the command does, with trouble of time and ranks: a child process of the tests.

python tests/support/disturbed_train.py '{"clock": true, "slow": 0.4, "hangs": 12, "stops": 16}' train ...

    clock      the time of day jumps by days, back and forth, before every iteration
    slow       the last rank sleeps so many seconds in each of the first 10 iterations
    log        the file that rank 0 writes to
    hangs      in this iteration the last rank sleeps until rank 0 says so, in a function named `read_slowly`
    inside     {"forward": 12, "validation": 14, "save": 16}: so too, in these parts of these iterations
    compiles   in this one until rank 0 has noticed, and a little longer, in what looks like torch's compiler
    stops      in this one the last rank is stopped (SIGSTOP) until rank 0 says so
    dies       in this iteration the last rank is killed: SIGKILL
    leaves     [rank, iteration]: this rank is stopped for good
    early      the last rank is stopped for good before the first iteration, when it opens its data
    minute     seconds that a minute of train.distributed_timeout_minutes has
"""

import sys

sys.path.pop(0)  # this folder: its files are no top-level modules

import json
import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

from megatron_fp8.commands.main import main

SETTINGS = json.loads(sys.argv[1])
RANK, LAST = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")) - 1


NOW = [0]
"""The iteration."""
RUN_DIR = next(Path(word.partition("=")[2]) for word in sys.argv if word.startswith("--run_dir="))
SLOW = 10
SAID_S, SILENT_S = 100, 3.0
"""How long rank 0 may take to say something; after it wrote its stacks: until it would have."""


def read_slowly(iteration):
    """Until rank 0 has told this function's name: in its first line on this iteration or, on a busy machine, a later."""
    until = time.monotonic() + SAID_S
    while f"rank {RANK} works in iteration {iteration}" not in Path(SETTINGS["log"]).read_text():
        assert time.monotonic() < until, "rank 0 said nothing"
        time.sleep(0.1)


def compile_slowly(iteration):
    """In a file whose name is one of the compiler's."""
    program = compile("def work(): wait(number)", "/any/torch/_dynamo/convert_frame.py", "exec")
    found = {"wait": until_seen, "number": iteration}
    exec(program, found)
    found["work"]()


def until_seen(iteration):
    while not list(RUN_DIR.glob(f"stacks/*/iteration-{iteration}-*/rank-0.txt")):
        time.sleep(0.1)
    time.sleep(SILENT_S)


def stop(iteration):
    """Somebody else goes on with this process later."""
    said = (
        f"grep -q '^waiting     iteration {iteration} takes.*rank {RANK} does not answer' {SETTINGS['log']}"
    )
    until = f"for i in $(seq {5 * SAID_S}); do {said} && break; sleep 0.2; done; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", until], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def die(iteration):
    os.kill(os.getpid(), signal.SIGKILL)


def trouble(iteration):
    """What happens in an iteration before its step."""
    if SETTINGS.get("clock"):
        days, day = (-1) ** iteration * iteration, time.monotonic() + 1e9
        time.time = lambda: day + days * 86400
    if SETTINGS.get("leaves") == [RANK, iteration]:
        os.kill(os.getpid(), signal.SIGSTOP)
    if RANK != LAST:
        return
    time.sleep(SETTINGS.get("slow", 0) if iteration <= SLOW else 0)
    for name, act in {"hangs": read_slowly, "compiles": compile_slowly, "stops": stop, "dies": die}.items():
        if SETTINGS.get(name) == iteration:
            act(iteration)


def hang_inside(parts):
    """The last rank hangs in parts of iterations."""
    from megatron.core.models.gpt import GPTModel

    from megatron_fp8.train.resume.checkpoints import Checkpoints
    from megatron_fp8.train.step import Stepper

    owners = {
        "forward": (GPTModel, "forward"),
        "validation": (Stepper, "validate"),
        "save": (Checkpoints, "save"),
    }

    def hanging(part, original):
        def call(*args, **kwargs):
            if RANK == LAST and NOW[0] == parts.get(part):
                del parts[part]
                read_slowly(NOW[0])
            return original(*args, **kwargs)

        return call

    for part in list(parts):
        owner, name = owners[part]
        setattr(owner, name, hanging(part, getattr(owner, name)))


def troubled(arguments):
    from megatron_fp8.mcore import install

    install()
    from megatron.core import parallel_state

    from megatron_fp8.train.data import datasets
    from megatron_fp8.train.health import watchdog
    from megatron_fp8.train.launch import parallel
    from megatron_fp8.train.loop import Trainer

    watchdog.WINDOW_S, watchdog.WINDOW_ITERATIONS = 0.5, 3
    minute = SETTINGS.get("minute", 60)
    short = mock.patch.multiple  # both make their groups' timeouts of minutes
    step = Trainer._timed_step

    def timed_step(self, iteration, training):
        NOW[0] = iteration
        trouble(iteration)
        return step(self, iteration, training)

    Trainer._timed_step = timed_step
    hang_inside(SETTINGS.get("inside", {}))
    if SETTINGS.get("early") and RANK == LAST:
        datasets.build_datasets = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    minutes = lambda minutes: timedelta(seconds=minute * minutes)  # noqa: E731
    with short(parallel, timedelta=minutes), short(parallel_state, timedelta=minutes):
        return main(arguments)


sys.exit(troubled(sys.argv[2:]))
