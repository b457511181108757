"""`megatron-fp8 diagnose`: the cost of FP8 in a run, by layer, GEMM and operand."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import statistics
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..files.atomic_io import replace_file
from .checkpoint_options import Parser, run_command, say

HELP = """\
Measures what FP8 costs at a checkpoint, on the batches that training reads next: all layers in high precision, all as
planned, each layer alone in FP8, then the GEMMs and operands of the worst. Prints a verdict and a table, worst first,
and writes diagnosis.json, diagnosis.png and overrides.yaml.

  megatron-fp8 diagnose runs/fp8                               the latest checkpoint, the four batches that come next
  megatron-fp8 diagnose runs/fp8 --iteration 11                the batches from iteration 11 on, the checkpoint before
  megatron-fp8 diagnose runs/bf16 --recipe mxfp8               what a recipe would cost a run in BF16
  megatron-fp8 diagnose runs/one --against runs/two            where two runs on the same data diverge
  megatron-fp8 launch --ranks 4 diagnose RUN                   in the run's own parallel layout

tensorwise and rowwise have a scale for each shard, which differs in another layout: the command warns then.

overrides.yaml takes out of FP8 the sites that lose more than rounding explains:
  megatron-fp8 train --config FILE --model.fp8_overrides="$(cat overrides.yaml)"

`error` is the relative error of the gradient against high precision, `beyond rounding` the part of it that rounding to
FP8's significant bits does not explain, `loss` the change of the loss by this site alone, +- its noise. On a narrow
terminal a star marks the sites that stand out.

Exit codes: 0 done; 1 failed; 2 bad input.
"""


@dataclass(frozen=True)
class _Files:
    """Output paths of figures, overrides and plot; None: not written."""

    figures: Path | None
    overrides: Path | None
    plot: Path | None


@dataclass
class _Prepared:
    options: argparse.Namespace
    launch: Any
    replay: Any
    files: _Files
    good_loss: float | None


def main(arguments: list[str]) -> int:
    """Run `megatron-fp8 diagnose`; returns the exit code."""
    if any(argument.partition("=")[0] == "--against" for argument in arguments):
        from .cli_common import run
        from .divergence import compare

        return run(_parser(), arguments, compare)
    return run_command(_parser(), arguments, partial(_prepare, arguments), _diagnose)


def _parser() -> Parser:
    parser = Parser("diagnose", HELP)
    add = parser.add_argument
    add(
        "--iteration",
        type=int,
        metavar="N",
        help="take the batches from that of iteration N on (default: the next ones)",
    )
    add("--batches", type=int, help="batches, each of one iteration (default 4)")
    add("--share", type=float, help="what overrides must give back (default 0.9)")
    add("--budget", type=int, help="most passes, each a forward and a backward of a batch (default 1500)")
    add("--json", metavar="FILE", help="where the figures go (default: RUN_DIR/diagnosis/diagnosis.json)")
    add("--out", metavar="FILE", help="where overrides go (default: RUN_DIR/diagnosis/overrides.yaml)")
    add("--plot", metavar="FILE", help="where the plot goes (default: RUN_DIR/diagnosis/diagnosis.png)")
    add("--against", metavar="RUN", help="compare with another run, by telemetry and checkpoints")
    return parser


def _prepare(
    arguments: list[str], options: argparse.Namespace, run_options: list[str], launch: Any
) -> _Prepared:
    options.batches = 4 if options.batches is None else options.batches
    options.share = 0.9 if options.share is None else options.share
    if options.batches < 4:
        raise ValueError(
            f"--batches {options.batches} are too few: differences are judged by their spread over batches, give 4"
        )
    if not 0 < options.share <= 1:
        raise ValueError(f"--share {options.share:g} must be above 0 and at most 1")
    if options.recipe == "bf16":
        raise ValueError("--recipe bf16 has nothing in FP8 to diagnose: leave it out, or give a recipe")
    _check_files(options)
    from ..telemetry.diagnosis import BUDGET

    options.budget = BUDGET if options.budget is None else options.budget
    if options.budget < 8 * options.batches:
        raise ValueError(
            f"--budget {options.budget} passes are too few: {options.batches} batches need {8 * options.batches} to"
            " measure a thing"
        )
    from .. import mcore

    mcore.install()
    from ..train.replay import replay
    from ..train.run_record import run_folder_of

    checkpoint_replay = replay(
        options.checkpoint,
        launch,
        run_options,
        config=options.config,
        recipe=options.recipe,
        fp8=options.fp8,
        iteration=options.iteration,
        batches=options.batches,
    )
    _check_shards(checkpoint_replay, shlex.join(arguments))
    run_folder = run_folder_of(checkpoint_replay.folder)
    files = _files(options, run_folder / "diagnosis")
    say(f"checkpoint  {checkpoint_replay.folder}, iteration {checkpoint_replay.iteration}", launch)
    say(f"batches     {options.batches}, from that of iteration {checkpoint_replay.first} on", launch)
    for line in checkpoint_replay.lines:
        say(f"            {line}", launch)
    return _Prepared(
        options, launch, checkpoint_replay, files, _good_loss(run_folder, checkpoint_replay.iteration)
    )


def _check_files(options: argparse.Namespace) -> None:
    """Raise ValueError if an output file cannot be written, as far as is known before the measurement."""
    for name in filter(None, (options.json, options.out, options.plot)):
        folder = Path(name).absolute().parent
        if not folder.is_dir():
            raise ValueError(f"there is no folder {str(folder)!r} for {name!r}: make it first")
        if Path(name).is_dir():
            raise ValueError(f"{name!r} is a folder: give the name of a file to write")
    if options.plot is not None:
        from .diagnosis_plot import check_ending

        check_ending(Path(options.plot))


def _files(options: argparse.Namespace, folder: Path) -> _Files:
    """Only the files that options name, or else the run's default files. Raises ValueError if there is no folder."""
    named = (options.json, options.out, options.plot)
    if any(named):
        return _Files(*(Path(name) if name else None for name in named))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{str(folder)!r} cannot be written ({error.strerror}): give --json, --out and --plot"
        ) from error
    return _Files(folder / "diagnosis.json", folder / "overrides.yaml", folder / "diagnosis.png")


def _check_shards(replay: Any, arguments: str) -> None:
    """Raise ValueError if scales belong to other shards than the run's, unless requested or known to be harmless."""
    from ..train.replay_check import is_near

    shards, recorded = replay.shards, replay.recorded
    if shards is None or shards.asked:
        return
    difference = ""
    if recorded is not None:
        with replay.subject.unrecorded():
            loss = replay.subject.run(0).loss
        if is_near(loss, recorded):
            return
        difference = (
            f"; the loss of iteration {replay.first} is {loss:.4g} here, and was {recorded:.4g} in the run"
        )
    raise shards.refusal(arguments, difference)


def _good_loss(run_folder: Path, iteration: int) -> float | None:
    """The run's lowest mean loss over ten iterations, up to the checkpoint; None if there are fewer."""
    from ..train.run_record import RunRecord

    lines = [line.content for line in RunRecord(run_folder).metrics() if line.iteration() <= iteration]
    losses = [row["lm_loss"] for row in lines if row["lm_loss"] is not None and math.isfinite(row["lm_loss"])]
    if len(losses) < 10:
        return None
    return min(sum(losses[i : i + 10]) / 10 for i in range(len(losses) - 9))


def _diagnose(prepared: _Prepared) -> None:
    from ..telemetry.attribution import Limits
    from ..telemetry.diagnosis import diagnose_subject

    options, replay, first = prepared.options, prepared.replay, prepared.launch.rank == 0
    subject = replay.subject
    with subject.unrecorded():
        diagnosis = diagnose_subject(
            subject,
            options.share,
            options.budget,
            prepared.good_loss,
            Limits(),
            _progress() if first else _ignore,
        )
    if not first:
        return
    diagnosis = _with_recorded_loss(diagnosis, replay)
    facts = {
        "run": str(replay.folder),
        "iteration": replay.iteration,
        "first_batch_of_iteration": replay.first,
        "batches": subject.batches,
        "recipe": replay.run.model.fp8_recipe,
        "world_size": prepared.launch.world_size,
        "recorded_loss": replay.recorded,
    }
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    print(textwrap.fill(diagnosis.verdict, width) if width else diagnosis.verdict, end="\n\n", flush=True)
    print(format_table(diagnosis, width=width), flush=True)
    _write_all(prepared, diagnosis, facts)


def _write_all(prepared: _Prepared, diagnosis: Any, facts: dict[str, Any]) -> None:
    """Write all files, after removing files of an earlier diagnosis that this one does not replace."""
    files, replay = prepared.files, prepared.replay
    if not diagnosis.overrides:
        _remove(files.overrides, "nothing is to be taken out of FP8")
    if not diagnosis.ranking:
        _remove(files.plot, "nothing could be measured")
    if files.figures is not None:
        _write(files.figures, json.dumps({**facts, **diagnosis.as_dict()}, indent=1) + "\n")
    if diagnosis.overrides and files.overrides is not None:
        run_overrides = dict(replay.run.model.fp8_overrides or {})
        _write(files.overrides, overrides_text(run_overrides | diagnosis.overrides, diagnosis))
    if diagnosis.ranking and files.plot is not None:
        from .diagnosis_plot import draw

        draw(diagnosis, files.plot, f"{replay.folder}, iteration {replay.iteration}")
        print(f"written     {files.plot}", flush=True)


def _remove(path: Path | None, why: str) -> None:
    """Remove an earlier diagnosis's file; pipes and devices stay."""
    if path is None or not path.is_file():
        return
    try:
        path.unlink()
    except OSError as error:
        raise ValueError(
            f"{str(path)!r} of an earlier diagnosis cannot be removed ({error.strerror}): remove it, {why} now"
        ) from error
    print(f"removed     {path} of an earlier diagnosis: {why}", flush=True)


def _with_recorded_loss(diagnosis: Any, replay: Any) -> Any:
    """The diagnosis; its verdict begins with a note if the run recorded another loss for the first batch."""
    from ..train.replay_check import unlike

    if diagnosis.attribution is None or replay.recorded is None:
        return diagnosis
    note = unlike(
        diagnosis.attribution.planned.losses[0],
        replay.recorded,
        replay.first,
        statistics.stdev(diagnosis.losses),
    )
    return replace(diagnosis, verdict=f"{note} {diagnosis.verdict}", clean=False) if note else diagnosis


def overrides_text(overrides: dict[str, Any], found: Any) -> str:
    """YAML of overrides, with a comment."""
    import yaml

    recovered = (
        ""
        if found.cure.given_back is None
        else (f" They give back {found.cure.given_back:.0%} of that at this checkpoint.")
    )
    head = f"# Costs more in FP8 than it has to, by megatron-fp8 diagnose.{recovered}\n"
    return head + yaml.safe_dump(overrides, sort_keys=False, width=1000)


def format_table(found: Any, most: int = 24, width: int = 0) -> str:
    """The ranking, worst first, with fewer figures if it is wider than ``width`` columns (0: unlimited)."""
    from ..plan.timing import table

    findings = found.ranking[:most]
    if not findings:
        return "nothing could be measured"
    header = ["in FP8 alone", "error", "distance", "beyond rounding", "loss", "stands out by"]
    text = table(header, [[*_figures(finding), finding.why] for finding in findings])
    if 0 < width < len(text.partition("\n")[0]):
        text = _narrow(findings, width)
    hidden = len(found.ranking) - most
    return text + (f"\n... and {hidden} more, in the figures" if hidden > 0 else "")


def _figures(finding: Any) -> list[str]:
    return [
        finding.key,
        f"{finding.gradient_error:.2%}",
        f"{finding.distance:.4f}",
        f"{finding.excess:.4f}",
        _change(finding.loss_change, finding.loss_spread),
    ]


def _narrow(findings: list[Any], width: int) -> str:
    """Three figures for each part, names shortened at their start, and a star for each outlier."""
    from ..plan.timing import table

    rows = []
    for finding in findings:
        change = f"{finding.loss_change:+.4f}" if math.isfinite(finding.loss_change) else "not finite"
        rows.append([f"{finding.gradient_error:.0%}", f"{finding.excess:.3f}", change])
    header = ["error", "beyond", "loss"]
    figures = sum(max(map(len, column)) + 3 for column in zip(header, *rows, strict=True))
    room = max(width - figures - 6, 12)  # the frame, and the star before the name
    names = [
        ("* " if finding.stands_out else "  ")
        + (finding.key if len(finding.key) <= room else "..." + finding.key[3 - room :])
        for finding in findings
    ]
    return table(["  in FP8 alone", *header], [[name, *row] for name, row in zip(names, rows, strict=True)])


def _change(loss: float, spread: float) -> str:
    return f"{loss:+.4f} +- {spread:.4f}" if math.isfinite(loss) else "not finite"


def _write(path: Path, text: str) -> None:
    try:
        if path.exists() and not path.is_file():  # /dev/stdout
            path.write_text(text, encoding="utf-8")
        else:
            replace_file(path, text)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written ({error.strerror}): give another file") from error
    print(f"written     {path}", flush=True)


def _ignore(_: Any) -> None:
    pass


def _progress() -> Any:
    """Progress output: one changing line on a terminal, else a line every 30 s."""
    terminal, last = sys.stderr.isatty(), [0.0]

    def show(step: Any) -> None:
        now = time.monotonic()
        ended = step.done >= step.expected
        if now - last[0] < (0.2 if terminal else 30.0) and not (terminal and ended):
            return
        last[0] = now
        text = f"pass {step.done} of about {step.expected}, {_left(step.seconds_left)} left: {step.now}"
        print(
            f"\r\x1b[K{text[:100]}" if terminal else text,
            end="" if terminal else "\n",
            file=sys.stderr,
            flush=True,
        )
        if terminal and ended:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    return show


def _left(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
