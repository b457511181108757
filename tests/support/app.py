"""Runs `megatron-fp8` with its arguments as the command does, watched or disturbed: a child process of the tests.

python tests/support/app.py watch COUNTS.json train ...     count calls into Megatron-Core
python tests/support/app.py poison 2 train ...              the second step's loss is infinite
python tests/support/app.py tokens FILE.json generate ...   linears asked for their short way: [rows, done]
python tests/support/app.py waits FILE.json train ...       where the host of a GPU would wait in iteration 3
python tests/support/app.py ranks OPTIONS.json train ...    further options by rank: {"1": ["--optimizer.lr=1"]}
python tests/support/app.py spoil 2 train ...              a weight of the last rank is NaN after the second iteration
python tests/support/app.py outgrow 2 train ...            a weight is eight times as large after the second iteration
python tests/support/app.py damage scale:inf:2:1 train ...  memory of rank 1 goes bad after iteration 2 (memory_damage.py)
python tests/support/app.py full metrics,tfevents train ... there is no room for these files
python tests/support/app.py unindexed 0 train ...          there is no room for arrays: indices of samples
python tests/support/app.py spike 16:24 train ...          these samples are noise, and a small rise counts as a spike
python tests/support/app.py truncate 2 train ...           the corpus becomes shorter after the second iteration
python tests/support/app.py killed load train ...          SIGKILL where it calls this of mcore/checkpoint
python tests/support/app.py heard CASES.json                several commands; prints [code, stderr, stdout] of each
"""

import sys

sys.path.pop(0)  # this folder: its files are no top-level modules, though one is called as one of Python's

import contextlib
import io
import json
import os
import signal
from pathlib import Path
from unittest import mock

from megatron_fp8.commands.main import main


def watch(path, arguments):
    """Count calls of what the step must consist of; rank 0 writes the counts."""
    from megatron_fp8.mcore import install

    install()
    from megatron_fp8.train import model, step
    from megatron_fp8.train.data import datasets as data

    counts = {}

    def counted(owner, name):
        original = getattr(owner, name)
        counts[name] = 0

        def call(*args, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        setattr(owner, name, call)

    counted(model, "DistributedDataParallel")
    counted(model, "get_megatron_optimizer")
    counted(data.CorpusDataset, "__getitem__")
    counted(step, "get_forward_backward_func")
    code = main(arguments)
    if os.environ.get("RANK", "0") == "0":
        Path(path).write_text(json.dumps(counts))
    return code


def poison(number, arguments):
    """Make one batch's loss infinite."""
    from megatron_fp8.mcore import install

    install()
    from megatron_fp8.train import step

    original = step.batches

    def batches(*args, **kwargs):
        for i, batch in enumerate(original(*args, **kwargs), start=1):
            yield {**batch, "loss_mask": batch["loss_mask"] * float("inf")} if i == number else batch

    step.batches = batches
    return main(arguments)


def waited(path, arguments):
    """Where the host looks at values in the third iteration, and in the fourth, from its start to its line of metrics."""
    from megatron_fp8.mcore import install
    from tests.support.host_syncs import waits

    install()
    from megatron.core.optimizer import clip_grads

    from megatron_fp8.mcore.patches.missing_packages import norm_without_waiting
    from megatron_fp8.train.loop import Trainer

    original = Trainer._timed_step
    found = []

    def timed_step(self, iteration, training):
        if iteration < 3:
            return original(self, iteration, training)
        # The stand-in for apex's norm that is taken on a GPU.
        with mock.patch.object(clip_grads, "l2_norm_impl", norm_without_waiting), waits() as seen:
            metrics = original(self, iteration, training)
        found.append([seen.places, seen.hidden])
        return metrics

    Trainer._timed_step = timed_step
    code = main(arguments)
    Path(path).write_text(json.dumps(found))
    return code


def by_rank(path, arguments):
    """Each rank gets options of its own."""
    return main([*arguments, *json.loads(Path(path).read_text()).get(os.environ["RANK"], [])])


def after_iteration(number, disturb, arguments):
    """Call `disturb(trainer)` once iteration `number` is done."""
    from megatron_fp8.mcore import install

    install()
    from megatron_fp8.train.loop import Trainer

    original = Trainer._timed_step

    def timed_step(self, iteration, training):
        metrics = original(self, iteration, training)
        if iteration == number:
            disturb(self)
        return metrics

    Trainer._timed_step = timed_step
    return main(arguments)


def spoil(trainer):
    """Make one value of the last rank's second layer NaN, in the master too, which would put it right again."""
    import torch

    if os.environ.get("RANK", "0") != os.environ.get("LAST_RANK", "0"):
        return
    for group in trainer.stepper.optimizer.param_groups:
        for master in group["params"]:
            if master.dim() == 2:
                master.data.view(-1)[0] = torch.nan
                break
    for name, parameter in trainer.stepper.chunks[0].named_parameters():
        if "layers.1.mlp.linear_fc1.weight" in name:
            parameter.data.view(-1)[0] = torch.nan


def outgrow(trainer):
    """Make a weight of the third layer eight times as large, in the master too."""
    import torch

    name = "layers.2.mlp.linear_fc1.weight"
    (weight,) = (p for n, p in trainer.stepper.chunks[0].named_parameters() if name in n)
    for group in trainer.stepper.optimizer.param_groups:
        for master in group["params"]:
            if master.shape == weight.shape and torch.equal(master.to(weight.dtype), weight):
                master.data.mul_(8)
    weight.data.mul_(8)


def damage(words, arguments):
    """Damage what the words say, on one rank."""
    from tests.support.memory_damage import damage_from_words

    return after_iteration(*damage_from_words(words), arguments)


def spike(words, arguments):
    """FIRST:LAST: these places in the order of samples hold noise; FIRST:LAST:without: the data never had them;
    FIRST:LAST:told: rank 1 gets a SIGTERM while it goes back the second time.

    A spike is what is a fifth above the running mean.
    """
    from megatron_fp8.mcore import install

    install()

    from megatron_fp8.train import step

    first, last = map(int, words.split(":")[:2])
    from megatron_fp8.train.health import loss_spikes

    back = loss_spikes.Rollbacks.back

    def told(self, *given):
        if os.environ.get("RANK") == "1" and len(self.records) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return back(self, *given)

    if words.endswith("told"):
        loss_spikes.Rollbacks.back = told

    class Data:
        def __init__(self, real):
            self.real = real

        def __len__(self):
            return len(self.real)

        def __getitem__(self, index):
            if words.endswith("without"):
                return self.real[index + last - first if index >= first else index]
            sample = self.real[index]
            if first <= index < last:
                sample = {**sample, "labels": (sample["labels"] * 7 + 3) % 251}
            return sample

    original = step.batches

    def batches(dataset, *args):
        return original(Data(dataset) if args[1:] else dataset, *args)

    loss_spikes._FAR, loss_spikes._DEVIATIONS = 1.2, 0.1
    step.batches = batches
    return main(arguments)


def full(names, arguments):
    """Whoever writes to a file whose name has one of these parts (a,b) finds the disk full."""
    import errno

    write = os.write

    def written(handle, content):
        path = os.readlink(f"/proc/self/fd/{handle}")
        if any(name in Path(path).name for name in names.split(",")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, content)

    with mock.patch("os.write", written):
        return main(arguments)


def unindexed(_, arguments):
    """Whoever writes an array finds the disk full."""
    import errno

    with mock.patch("numpy.save", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        return main(arguments)


def truncate(trainer):
    """Cut the data set short, as another program may."""
    prefix = trainer.stepper.datasets[0].dataset_path
    os.truncate(f"{prefix}.bin", 4096)


def killed(name, arguments):
    """End without a word where this function is called."""
    from megatron_fp8.mcore import checkpoint

    with mock.patch.object(checkpoint, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
        return main(arguments)


def heard(path, _):
    """Run each command of a file; print their exit codes and what they said."""
    results = []
    for arguments in json.loads(Path(path).read_text()):
        said, printed = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
            code = main(arguments)
        results.append([code, said.getvalue(), printed.getvalue()])
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    kind, first, rest = sys.argv[1], sys.argv[2], sys.argv[3:]
    sys.exit(
        {
            "watch": watch,
            "outgrow": lambda n, a: after_iteration(int(n), outgrow, a),
            "poison": lambda n, a: poison(int(n), a),
            "ranks": by_rank,
            "waits": waited,
            "spoil": lambda n, a: after_iteration(int(n), spoil, a),
            "damage": damage,
            "full": full,
            "unindexed": unindexed,
            "spike": spike,
            "truncate": lambda n, a: after_iteration(int(n), truncate, a),
            "killed": killed,
            "heard": heard,
        }[kind](first, rest)
    )
