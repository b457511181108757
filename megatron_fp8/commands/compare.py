"""`megatron-fp8 compare`: recipes against BF16 on one model, data, seeds and layout.

Trains a config in BF16 and in each recipe, with the same data, seeds and parallel layout, and says how they differ.

  megatron-fp8 compare --config tiny_gpt_cpu --recipes bf16,tensorwise,mxfp8 --seeds 3
  megatron-fp8 compare --config my.yaml --recipes delayed,blockwise --seeds 1,2 --train.train_iters=200 --out runs/cmp
  megatron-fp8 compare --config my.yaml --recipes delayed,delayed+fp8_margin=2,nvfp4+fp4_disable_rht

Every key of `megatron-fp8 train` may follow as --section.key=value, for all runs alike. A key of the model for one run
alone follows its recipe, after a plus; without a value it is true. Runs are trained one after
another on this machine, each on as many processes as its layout needs (--ranks N adds data-parallel ones).

Writes into --out compare.md (tables and a verdict), compare.json, compare.png, compare.html, runs/RECIPE-seed-SEED and
logs/. A comparison that was ended goes on when the same command is given again. To use a run that you have, put it at
runs/RECIPE-seed-SEED there.

The verdict compares a recipe's loss with BF16's of the same seed, and that difference with how far BF16's own seeds lie
apart. One seed shows no noise; three or more are better. What the columns are: docs/compare.md.

Exit codes: 0 done, whatever the verdict; 1 a run failed or has no finite loss; 2 bad input.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ..files.atomic_io import replace_file
from .cli_common import CommandParser, run
from .report import BokehMissing, write_page

if TYPE_CHECKING:
    from ..study.compare_plan import Comparison


def main(arguments: list[str]) -> int:
    """Train missing runs and write the comparison; return the exit code."""
    parser = CommandParser("compare", __doc__)
    add = parser.add_argument
    add("--config", metavar="FILE", required=True, help="the run's config, a file or a shipped one's name")
    add("--recipes", default="bf16,tensorwise,mxfp8", help="separated by commas (default %(default)s)")
    add("--seeds", default="3", help="how many, or several separated by commas (default %(default)s)")
    add("--out", metavar="DIR", type=Path, help="where everything goes (default runs/compare-CONFIG)")
    add("--ranks", type=int, metavar="N", help="processes of a run (default: as few as its layout needs)")
    return run(parser, arguments, _compare, run_options=True)


def _compare(options: Namespace, overrides: list[str]) -> None:
    """Raises ValueError for bad input; StudyFailed."""
    from .. import mcore

    mcore.install()
    from ..study.compare_plan import plan
    from ..study.compare_runs import lock_folder

    for name in ("RANK", "SLURM_PROCID"):
        if os.environ.get(name, "0") != "0":
            raise ValueError(
                f"{name}={os.environ[name]}: compare starts the ranks of its runs itself; start it once."
            )
    comparison = plan(options.config, options.recipes, options.seeds, overrides, options.out, options.ranks)
    with lock_folder(comparison.out):
        _train_and_write(comparison)


def _train_and_write(comparison: Comparison) -> None:
    """Raises ValueError for bad input; StudyFailed."""
    from ..study import compare_results, compare_runs

    for wanted in comparison.runs:
        if wanted.finished:  # report damaged files before training others
            compare_results.read_outcome(wanted)
    compare_runs.train_all(comparison)
    outcomes = [compare_results.read_outcome(wanted) for wanted in comparison.runs]
    content = compare_results.document(comparison, outcomes)
    replace_file(comparison.out / "compare.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    replace_file(comparison.out / "compare.md", compare_results.as_markdown(content))
    compare_results.draw(content, comparison.out / "compare.png")
    print(f"{compare_results.as_table(content)}\n\n{content['verdict']}\n")
    print(f"{comparison.out / 'compare.md'}, compare.json, compare.png")
    try:
        write_page([wanted.folder for wanted in comparison.runs], comparison.out / "compare.html")
    except BokehMissing as error:
        print(f"compare.html is not written: {error}")
