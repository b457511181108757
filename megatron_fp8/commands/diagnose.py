"""`megatron-fp8 diagnose`: the cost of FP8 in a run, by layer, GEMM and operand.

Measures what FP8 costs at a checkpoint, on the batches that training reads next: all layers in high precision, all as
planned, each layer alone in FP8, then the GEMMs and operands of the worst. Prints a verdict and a table, worst first,
and writes diagnosis.json, diagnosis.png and overrides.yaml.

  megatron-fp8 diagnose runs/fp8                               the latest checkpoint, the four batches that come next
  megatron-fp8 diagnose runs/fp8 --iteration 11                the batches from iteration 11 on, the checkpoint before
  megatron-fp8 diagnose runs/bf16 --recipe mxfp8               what a recipe would cost a run in BF16
  megatron-fp8 diagnose runs/one --against runs/two            where two runs on the same data diverge
  megatron-fp8 diagnose runs/fp8 --formats mxfp8,nvfp4         each GEMM in each format, and the cheapest plan
  megatron-fp8 launch --ranks 4 diagnose RUN                   in the run's own parallel layout

tensorwise and rowwise have a scale for each shard, which differs in another layout: the command warns then.

overrides.yaml takes out of FP8 the sites that lose more than rounding explains:
  megatron-fp8 train --config FILE --model.fp8_overrides="$(cat overrides.yaml)"

--formats measures fprop, dgrad and wgrad of each layer in each format and chooses, for each, the fastest within
--loss-budget (0.01: 1 % of the loss, for all together). It writes formats.json and the plan as plan.yaml (overrides, for
--model.fp8_overrides), plan_megatron.yaml (Megatron-Core) and plan_te.py (Transformer Engine). A GEMM's time counts as
1 in BF16, 1/2 in FP8, 1/4 in NVFP4: peak rates, not measured. Layers that the run keeps in BF16 stay there.

`error` is the relative error of the gradient against high precision, `beyond rounding` the part of it that rounding to
FP8's significant bits does not explain, `loss` the change of the loss by this site alone, +- its noise.

Exit codes: 0 done; 1 failed; 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..files.atomic_io import as_value_error, own_output
from ..files.terminal import printable
from .cli_common import CheckpointParser, check_outputs, run, run_command, say, write_error, write_output

if TYPE_CHECKING:
    from ..diagnosis.diagnosis import Diagnosis
    from ..diagnosis.format_costs import FormatPlan
    from ..diagnosis.measurements import Progress
    from ..diagnosis.replay import Replay
    from ..recipe import Recipe


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
    add("--formats", metavar="LIST", help="plan by GEMM: recipes beside bf16, such as mxfp8,nvfp4")
    add(
        "--loss-budget", type=float, metavar="PART", help="of the loss, that the plan may cost (default 0.01)"
    )
    add("--json", metavar="FILE", help="where the figures go (default: RUN_DIR/diagnosis/diagnosis.json)")
    add("--out", metavar="FILE", help="where overrides go (default: RUN_DIR/diagnosis/overrides.yaml)")
    add("--plot", metavar="FILE", help="where the plot goes (default: RUN_DIR/diagnosis/diagnosis.png)")
    add("--against", metavar="RUN", help="compare with another run, by telemetry and checkpoints")
    return parser


_DIAGNOSIS_OPTIONS = (
    *("iteration", "batches", "share", "budget", "out", "plot"),
    *("recipe", "fp8", "config", "formats", "loss_budget"),
)
"""Options that do not apply to a comparison."""


def _compare(options: argparse.Namespace) -> None:
    """Print where two runs diverge, and write it to --json."""
    from ..diagnosis.run_comparison import compare_runs
    from ..files.strict_json import nonfinite_as_text

    for name in _DIAGNOSIS_OPTIONS:
        if getattr(options, name) is not None:
            raise ValueError(f"--against compares two finished runs: leave out --{name.replace('_', '-')}")
    lines, report = compare_runs(Path(options.checkpoint), Path(options.against))
    print(printable("\n".join(lines)), flush=True)
    if options.json:
        text = json.dumps(nonfinite_as_text(report), indent=1, allow_nan=False) + "\n"
        write_output("--json", Path(options.json), text)


def _prepare(options: argparse.Namespace, run_options: list[str], launch: Any) -> Callable[[], None]:
    from ..diagnosis.diagnosis import BUDGET, check_request

    formats = _formats(options)
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
    folder = run_folder_of(replayed.folder) / "diagnosis"
    files = _plan_files(options, folder) if formats else _files(options, folder)
    say(f"checkpoint  {replayed.folder}, iteration {replayed.iteration}", launch)
    say(f"batches     {options.batches}, from that of iteration {replayed.first} on", launch)
    for line in replayed.lines:
        say(f"            {line}", launch)
    if formats:
        from ..diagnosis.format_costs import check_passes

        check_passes(options.budget, options.batches, len(replayed.runner.plans), formats)
        return partial(_plan_formats, options, launch, replayed, files, formats)
    return partial(_diagnose, options, launch, replayed, files, replayed.good_loss())


def _formats(options: argparse.Namespace) -> tuple[str, ...]:
    """The formats of --formats; empty without it. Raises ValueError, also for options that do not go with it."""
    from ..diagnosis.format_costs import LOSS_BUDGET, check_formats

    if options.formats is None:
        if options.loss_budget is not None:
            raise ValueError("--loss-budget is of --formats: give that too, such as --formats mxfp8,nvfp4")
        return ()
    for name in ("share", "plot"):
        if getattr(options, name) is not None:
            raise ValueError(f"--formats measures a plan by GEMM: leave out --{name}")
    options.loss_budget = LOSS_BUDGET if options.loss_budget is None else options.loss_budget
    if not 0 < options.loss_budget < 1:
        raise ValueError(
            f"--loss-budget {options.loss_budget:g} must be above 0 and below 1: a part of the loss"
        )
    return check_formats(options.formats)


def _plan_files(options: argparse.Namespace, folder: Path) -> _Files:
    """As ``_files``, of --formats, which has no plot."""
    if options.json or options.out:
        return _files(options, folder)
    files = _files(options, folder)
    return files._replace(figures=folder / "formats.json", overrides=folder / "plan.yaml", plot=None)


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
    with as_value_error(f"{str(folder)!r} cannot be written", ": give --json, --out and --plot"):
        folder.mkdir(parents=True, exist_ok=True)
    return _Files(folder / "diagnosis.json", folder / "overrides.yaml", folder / "diagnosis.png")


def _diagnose(
    options: argparse.Namespace, launch: Any, replayed: Replay, files: _Files, good_loss: float | None
) -> None:
    from ..diagnosis.attribution import Limits
    from ..diagnosis.diagnosis import diagnose_runner
    from ..diagnosis.output import format_table

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
    _write_all(files, replayed, diagnosis, _facts(options, launch, replayed))


def _facts(options: argparse.Namespace, launch: Any, replayed: Replay) -> dict[str, Any]:
    """What was measured, for JSON."""
    from ..fp8_utils import recipe_name_of

    return {
        "run": str(replayed.folder),
        "iteration": replayed.iteration,
        "first_batch_of_iteration": replayed.first,
        "batches": options.batches,
        "recipe": recipe_name_of(replayed.run.model),
        "world_size": launch.world_size,
        "recorded_loss": replayed.recorded,
    }


def _plan_formats(
    options: argparse.Namespace, launch: Any, replayed: Replay, files: _Files, formats: tuple[str, ...]
) -> None:
    """Measure --formats, print the plan and write its files."""
    from ..diagnosis.format_costs import format_table, measure_formats, plan_text

    progress: Callable[[Progress], None] = _progress() if launch.rank == 0 else lambda _: None
    runner = replayed.runner
    with runner.unrecorded():
        found = measure_formats(runner, formats, options.loss_budget, options.budget, progress)
    if launch.rank:
        return
    print(plan_text(found), end="\n\n", flush=True)
    print(format_table(found), flush=True)
    if files.figures is not None:
        facts = _facts(options, launch, replayed)
        write_output("--json", files.figures, json.dumps({**facts, **found.as_dict()}, indent=1) + "\n")
        print(f"written     {files.figures}", flush=True)
    if files.overrides is not None:
        _write_plan(files.overrides, found, {name: runner.recipe(name) for name in formats}, replayed)


def _write_plan(path: Path, found: FormatPlan, recipes: dict[str, Recipe], replayed: Replay) -> None:
    """Write a plan's overrides and, beside them, its files for Megatron-Core and Transformer Engine."""
    from ..diagnosis.plan_files import megatron_yaml, overrides_yaml, te_factories, te_refusal

    stem = re.sub(r"\W", "_", path.stem)  # Python imports it
    others = path.with_name(f"{stem}_megatron.yaml"), path.with_name(f"{stem}_te.py")
    if not found.gemms:
        for old in (path, *others):
            _remove(old, "no GEMM fits the budget")
        return
    texts = {path: overrides_yaml(found, replayed.run.model.fp8_overrides or {})}
    if (path.is_file() and own_output(path) is None) or not path.exists():  # a pipe has nothing beside it
        if reason := te_refusal(recipes):
            print(f"not written {others[0].name}, {others[1].name}: {reason}", flush=True)
        else:
            texts[others[0]] = megatron_yaml(found.gemms, recipes, others[1].stem)
            texts[others[1]] = te_factories(found.gemms, recipes)
    for file, text in texts.items():
        write_output("--out", file, text)
        print(f"written     {file}", flush=True)


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
            raise write_error("--plot", files.plot, error) from error
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
