"""`megatron-fp8 compare`: recipes against BF16 on one model, data, seeds and layout."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ..files.atomic_io import replace_file
from ..train.stop import EXIT_DONE, EXIT_FAILED
from .cli_common import CommandParser, refuse, warn_in_lines

if TYPE_CHECKING:
    from ..study.compare_plan import Comparison

DESCRIPTION = """\
Trains a config in BF16 and in each recipe, with the same data, seeds and parallel layout, and says how they differ.

  megatron-fp8 compare --config tiny_gpt_cpu --recipes bf16,tensorwise,mxfp8 --seeds 3
  megatron-fp8 compare --config my.yaml --recipes delayed,blockwise --seeds 1,2 --train.train_iters=200 --out runs/cmp

Every key of `megatron-fp8 train` may follow as --section.key=value, for all runs alike. Runs are trained one after
another on this machine, each on as many processes as its layout needs (--ranks N adds data-parallel ones).

Writes into DIR (--out): compare.md (tables and a verdict), compare.json, compare.png, compare.html (every run's report
on one page), runs/RECIPE-seed-SEED and logs/. A comparison that was ended goes on when the same command is given again: a
finished run is not repeated, and one that was cut off goes on from its latest checkpoint (--checkpoint.save_interval=N
writes some), else from its start. To use a run that you have, put it at DIR/runs/RECIPE-seed-SEED: its settings have to
agree.

The verdict compares a recipe's loss with BF16's of the same seed, and that difference with how far BF16's own seeds lie
apart. One seed shows no noise; three or more are better. What the columns are: docs/compare.md.

--config takes a file, or the name of a config that comes with the package, as tiny_gpt_cpu is. One comparison at a time
can use a folder; a second is refused.

Exit codes: 0 done, whatever the verdict; 1 a run failed or has no finite loss; 2 bad input, found before anything is
trained.
"""


def main(arguments: list[str]) -> int:
    """Train missing runs and write the comparison; return the exit code."""
    warn_in_lines()
    debug = "--debug" in arguments
    parser = CommandParser("compare", DESCRIPTION)
    add = parser.add_argument
    add("--config", metavar="FILE", required=True, help="the run's config, a file or a shipped one's name")
    add("--recipes", default="bf16,tensorwise,mxfp8", help="separated by commas (default %(default)s)")
    add("--seeds", default="3", help="how many, or several separated by commas (default %(default)s)")
    add("--out", metavar="DIR", type=Path, help="where everything goes (default runs/compare-CONFIG)")
    add("--ranks", type=int, metavar="N", help="processes of a run (default: as few as its layout needs)")
    try:
        options, overrides = parser.parse_known_args(arguments)
    except ValueError as error:
        return refuse(error, debug=debug)
    from ..study.compare_runs import RunFailed

    try:
        _compare(options, overrides)
    except ValueError as error:
        return refuse(error, debug=debug)
    except RunFailed as error:
        return refuse(error, debug=debug, code=EXIT_FAILED)
    return EXIT_DONE


def _compare(options: Namespace, overrides: list[str]) -> None:
    """Raises ValueError for bad input; RunFailed."""
    from .. import mcore

    mcore.install()
    from ..study import compare_runs
    from ..study.compare_plan import plan

    for name in ("RANK", "SLURM_PROCID"):
        if os.environ.get(name, "0") != "0":
            raise ValueError(
                f"{name}={os.environ[name]}: compare starts the ranks of its runs itself; start it once."
            )
    comparison = plan(options.config, options.recipes, options.seeds, overrides, options.out, options.ranks)
    with compare_runs.held(comparison.out):
        _train_and_write(comparison)


def _train_and_write(comparison: Comparison) -> None:
    """Raises ValueError for bad input; RunFailed."""
    from ..study import compare_results, compare_runs

    for run in comparison.runs:
        if run.finished:  # report damaged files before training others
            compare_results.read_outcome(run)
    compare_runs.train_all(comparison)
    outcomes = [compare_results.read_outcome(run) for run in comparison.runs]
    content = compare_results.document(comparison, outcomes)
    replace_file(comparison.out / "compare.json", compare_results.as_json(content))
    replace_file(comparison.out / "compare.md", compare_results.as_markdown(content))
    compare_results.draw(content, comparison.out / "compare.png")
    print(f"{compare_results.as_table(content)}\n\n{content['verdict']}\n")
    print(f"{comparison.out / 'compare.md'}, compare.json, compare.png")
    _page([run.folder for run in comparison.runs], comparison.out / "compare.html")


def _page(folders: list[Path], path: Path) -> None:
    """Write the page of all runs, if bokeh is installed."""
    try:
        import bokeh  # noqa: F401
    except ModuleNotFoundError:
        print("compare.html is not written: it needs the package bokeh, pip install 'bokeh>=3.9'")
        return
    from .report import write_page

    write_page(folders, path)
