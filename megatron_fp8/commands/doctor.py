"""`megatron-fp8 doctor`: what this machine can run, and what is missing.

Whether FP8 works on this machine, in the first line. Then versions, what is missing and how to get it, versions that are
known not to work together, and an FP8 GEMM of every recipe on every backend, beside the exact product of its codes.

  megatron-fp8 doctor
  megatron-fp8 doctor --matrix                  which recipe runs on which GPU
  megatron-fp8 doctor --config tiny_gpt_cpu     is all here that this run needs?
  megatron-fp8 doctor --json                    docs/doctor.md has the schema

Options of the run may follow --config as in `train`. What data hold and whether the layout fits the ranks,
`megatron-fp8 train --dry-run` checks.

Exit codes: 0 done; 1 a product is wrong, or the config needs what is not here; 2 bad input, or a config that `train`
refuses.
"""

from __future__ import annotations

import argparse
import json
import sys

from .cli_common import CommandParser, run


def main(arguments: list[str]) -> int:
    """Print the findings; returns the exit code."""
    return run(_parser(), arguments, _examine, run_options=True)


def _parser() -> CommandParser:
    parser = CommandParser("doctor", __doc__)
    parser.add_argument("--config", metavar="FILE", help="a run's config, a file or a shipped one's name")
    parser.add_argument("--matrix", action="store_true", help="also which recipe runs on which device")
    parser.add_argument("--json", action="store_true", help="one object, with the matrix")
    return parser


def _examine(options: argparse.Namespace, run_options: list[str]) -> int:
    from ..files.user_paths import config_hint
    from ..study.doctor import examine, format_findings

    if run_options and options.config is None:
        word, parser = run_options[0], _parser()
        hint = parser.near(word) or "." + config_hint(word)
        raise ValueError(f"{word!r} is no option of doctor, and options of a run need its --config{hint}")
    config_options = [f"--config={options.config}"] if options.config is not None else []
    examination = examine([*config_options, *run_options])
    if config_options and not examination.needs:
        from .. import mcore

        mcore.install()
        from ..train.startup import settings

        settings([*config_options, *run_options], ranks=1)
    print(
        json.dumps(examination.as_dict())
        if options.json
        else format_findings(examination, with_matrix=options.matrix)
    )
    if examination.wrong:
        print(
            f"error: {', '.join(examination.wrong)} computed a wrong product; please report this",
            file=sys.stderr,
        )
    return examination.exit_code
