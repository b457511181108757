"""`megatron-fp8 diagnose`: the cost of FP8 in a run, by layer, GEMM and operand.

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
FP8's significant bits does not explain, `loss` the change of the loss by this site alone, +- its noise.

Exit codes: 0 done; 1 failed; 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..files.atomic_io import explained, own_output
from ..files.terminal import printable
from .cli_common import CheckpointParser, check_outputs, not_written, run, run_command, say, write_output

if TYPE_CHECKING:
    from ..diagnosis.diagnosis import Diagnosis
    from ..diagnosis.measurements import Progress
    from ..diagnosis.replay import Replay


class _Files(NamedTuple):
    """Output paths of figures, overrides and plot; None: not written."""

    figures: Path | None
    overrides: Path | None
    plot: Path | None


def main(arguments: list[str]) -> int:
    """Run `megatron-fp8 diagnose`; returns the exit code."""
    if any(argument.partition("=")[0] == "--against" for argument in arguments):
        return run(_parser(), arguments, _compare)
    return run_command(_parser(), arguments, _prepare)


def _parser() -> CheckpointParser:
    parser = CheckpointParser("diagnose", __doc__)
    add = parser.add_argument
    add("--iteration", type=int, metavar="N", help="batches from this iteration on (default: the next)")
    add("--batches", type=int, help="batches, each of one iteration (default 4)")
    add("--share", type=float, help="fraction of FP8's error that overrides must remove (default 0.9)")
    add("--budget", type=int, help="maximum number of forward-backward passes (default 1500)")
    add("--json", metavar="FILE", help="where the figures go (default: RUN_DIR/diagnosis/diagnosis.json)")
    add("--out", metavar="FILE", help="where overrides go (default: RUN_DIR/diagnosis/overrides.yaml)")
    add("--plot", metavar="FILE", help="where the plot goes (default: RUN_DIR/diagnosis/diagnosis.png)")
    add("--against", metavar="RUN", help="compare with another run, by telemetry and checkpoints")
    return parser


_DIAGNOSIS_OPTIONS = (
    *("iteration", "batches", "share", "budget", "out", "plot"),
    *("recipe", "fp8", "config"),
)
"""Options that do not apply to a comparison."""


def _compare(options: argparse.Namespace) -> None:
    """Print where two runs diverge, and write it to --json."""
    from ..diagnosis.run_comparison import compare_runs
    from ..files.strict_json import spelled_out

    for name in _DIAGNOSIS_OPTIONS:
        if getattr(options, name) is not None:
            raise ValueError(f"--against compares two finished runs: leave out --{name}")
    lines, report = compare_runs(Path(options.checkpoint), Path(options.against))
    print(printable("\n".join(lines)), flush=True)
    if options.json:
        text = json.dumps(spelled_out(report), indent=1, allow_nan=False) + "\n"
        write_output("--json", Path(options.json), text)


def _prepare(options: argparse.Namespace, run_options: list[str], launch: Any) -> Callable[[], None]:
    from ..diagnosis.diagnosis import BUDGET, check_request

    options.batches = 4 if options.batches is None else options.batches
    options.share = 0.9 if options.share is None else options.share
    options.budget = BUDGET if options.budget is None else options.budget
    check_request(options.batches, options.share, options.budget, "--{} {}")
    if options.recipe == "bf16":
        raise ValueError("--recipe bf16 has nothing in FP8 to diagnose: leave it out, or give a recipe")
    _check_files(options)
    from .. import mcore

    mcore.install()
    from ..diagnosis.replay import replay
    from ..train.run_record import run_folder_of

    replayed = replay(
        options.checkpoint,
        launch,
        run_options,
        config=options.config,
        recipe=options.recipe,
        fp8=options.fp8,
        iteration=options.iteration,
        batches=options.batches,
    )
    files = _files(options, run_folder_of(replayed.folder) / "diagnosis")
    say(f"checkpoint  {replayed.folder}, iteration {replayed.iteration}", launch)
    say(f"batches     {options.batches}, from that of iteration {replayed.first} on", launch)
    for line in replayed.lines:
        say(f"            {line}", launch)
    return partial(_diagnose, options, launch, replayed, files, replayed.good_loss())


def _check_files(options: argparse.Namespace) -> None:
    """Raise ValueError if an output file cannot be written, as far as is known before the measurement."""
    check_outputs({f"--{name}": getattr(options, name) for name in ("json", "out", "plot")})
    if options.plot is not None:
        from matplotlib.backend_bases import FigureCanvasBase

        kinds = sorted(FigureCanvasBase.get_supported_filetypes())
        if Path(options.plot).suffix[1:].lower() not in kinds:
            raise ValueError(
                f"--plot {options.plot!r} ends in no kind of picture: give one of .{', .'.join(kinds)}"
            )


def _files(options: argparse.Namespace, folder: Path) -> _Files:
    """Only the files that options name, or else the run's default files. Raises ValueError if there is no folder."""
    named = (options.json, options.out, options.plot)
    if any(named):
        return _Files(*(Path(name) if name else None for name in named))
    with explained(f"{str(folder)!r} cannot be written", ": give --json, --out and --plot"):
        folder.mkdir(parents=True, exist_ok=True)
    return _Files(folder / "diagnosis.json", folder / "overrides.yaml", folder / "diagnosis.png")


def _diagnose(
    options: argparse.Namespace, launch: Any, replayed: Replay, files: _Files, good_loss: float | None
) -> None:
    from ..diagnosis.attribution import Limits
    from ..diagnosis.diagnosis import diagnose_runner
    from ..diagnosis.output import format_table
    from ..fp8_utils import recipe_name_of

    progress: Callable[[Progress], None] = _progress() if launch.rank == 0 else lambda _: None
    with replayed.runner.unrecorded():
        diagnosis = diagnose_runner(
            replayed.runner, options.share, options.budget, good_loss, Limits(), progress
        )
    if launch.rank:
        return
    diagnosis = replayed.with_recorded_loss(diagnosis)
    print(diagnosis.verdict, end="\n\n", flush=True)
    print(format_table(diagnosis.ranking), flush=True)
    facts = {
        "run": str(replayed.folder),
        "iteration": replayed.iteration,
        "first_batch_of_iteration": replayed.first,
        "batches": options.batches,
        "recipe": recipe_name_of(replayed.run.model),
        "world_size": launch.world_size,
        "recorded_loss": replayed.recorded,
    }
    _write_all(files, replayed, diagnosis, facts)


def _write_all(files: _Files, replayed: Replay, diagnosis: Diagnosis, facts: dict[str, Any]) -> None:
    """Write all files, after removing files of an earlier diagnosis that this one does not replace."""
    from ..diagnosis.output import draw, overrides_text

    if not diagnosis.overrides:
        _remove(files.overrides, "nothing is to be taken out of FP8")
    if not diagnosis.ranking:
        _remove(files.plot, "nothing could be measured")
    if files.figures is not None:
        write_output("--json", files.figures, json.dumps({**facts, **diagnosis.as_dict()}, indent=1) + "\n")
        print(f"written     {files.figures}", flush=True)
    if diagnosis.overrides and files.overrides is not None:
        overrides = dict(replayed.run.model.fp8_overrides or {}) | diagnosis.overrides
        write_output("--out", files.overrides, overrides_text(overrides, diagnosis.remedy))
        print(f"written     {files.overrides}", flush=True)
    if diagnosis.ranking and files.plot is not None:
        try:
            draw(diagnosis, files.plot, f"{replayed.folder}, iteration {replayed.iteration}")
        except OSError as error:
            raise not_written("--plot", files.plot, error) from error
        print(f"written     {files.plot}", flush=True)


def _remove(path: Path | None, why: str) -> None:
    """Remove an earlier diagnosis's file; pipes, devices and this process's own output stay."""
    if path is not None and path.is_file() and own_output(path) is None:
        path.unlink()
        print(f"removed     {path} of an earlier diagnosis: {why}", flush=True)


def _progress() -> Callable[[Progress], None]:
    """Progress output: a line every 15 s."""
    last = time.monotonic()

    def show(step: Progress) -> None:
        nonlocal last
        if time.monotonic() - last < 15.0:
            return
        last, left = time.monotonic(), step.seconds_left
        time_left = f"{left / 60:.0f} min" if left >= 100 else f"{left:.0f} s"
        text = f"pass {step.done} of about {step.expected}, {time_left} left: {step.now}"
        print(text, file=sys.stderr, flush=True)

    return show
