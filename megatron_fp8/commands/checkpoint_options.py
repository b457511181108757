"""Shared options and steps of commands that read a checkpoint or run on ranks."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ..files.resource_limits import limit_reached
from ..files.terminal import printable
from ..train.failure import EXIT_DONE, EXIT_FAILED
from .cli_common import CommandParser, refuse, warn_in_lines


def element_formats(text: str) -> str:
    """Check the value of --fp8."""
    from ..plan.settings import FP8_FORMATS
    from ..recipe import RECIPES

    if text not in FP8_FORMATS:
        hint = f"; {text!r} is a recipe: give it as --recipe" if text in RECIPES else ""
        raise argparse.ArgumentTypeError(f"{text!r} must be one of {', '.join(FP8_FORMATS)}{hint}")
    return text


class Parser(CommandParser):
    """The options of every command that reads a checkpoint."""

    def __init__(self, command: str, description: str):
        super().__init__(command, description)
        self.add_argument("checkpoint", help="a run's folder, a folder of checkpoints, or a checkpoint")
        self.add_argument("--config", metavar="FILE", help="the run's config, where the checkpoint has none")
        self.add_argument("--recipe", help="FP8 recipe, or bf16 (default: the one it was trained with)")
        formats = "element formats, hybrid or e4m3 (default: the run's)"
        self.add_argument("--fp8", type=element_formats, metavar="FORMATS", help=formats)

    def parse(self, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """(options, options of the run's model section such as --model.fp8_pow2_scales=true)."""
        options, rest = self.parse_known_args(arguments)
        for argument in rest:
            if not argument.startswith(("--model.", "--checkpoint.accept")) or "=" not in argument:
                self.error(
                    f"{argument} is not an option (of the run's config --model.NAME=VALUE and --checkpoint.accept=NAME"
                    f" may be given){self.near(argument)}"
                )
        return options, rest


_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Disk errors during a command, which are no fault of its input."""


def run_command(
    parser: CommandParser,
    arguments: list[str],
    prepare: Callable[[argparse.Namespace, list[str], Any], Any],
    work: Callable[[Any], None],
) -> int:
    """Parse, call ``prepare(options, run options, launch)`` and ``work(its result)``; return the exit code.

    Bad input (2): ValueError and OSError, and RuntimeError of prepare. Failed (1): other exceptions, and errors that
    another attempt may avoid (network, GPU, missing ranks).
    """
    if {"-h", "--help"} & set(arguments):  # before the ranks connect, which takes seconds
        parser.print_help()
        return EXIT_DONE
    from ..train.launch import parallel
    from ..train.launch.environment import find_launch

    warn_in_lines()
    debug = "--debug" in arguments
    try:
        launch = parallel.connect(find_launch(_of_this_process(os.environ)))
    except ValueError as error:
        return refuse(error, debug=debug)
    if launch.rank:  # rank 0 prints the same warnings
        warnings.filterwarnings("ignore", module="megatron_fp8")
    barrier = launch.barrier
    assert barrier is not None
    try:
        with barrier:
            try:
                try:
                    options, run_options = parser.parse(arguments)
                    prepared = prepare(options, run_options, launch)
                except (RuntimeError, OSError, MemoryError) as error:
                    return refuse(error, debug=debug, tell=barrier.tell, code=parallel.exit_code(error))
                barrier.close()
                work(prepared)
            except BrokenPipeError:  # the reader of the output has ended
                raise
            except (ValueError, OSError) as error:
                disk_error = isinstance(error, OSError) and error.errno in _DISK_ERRORS
                code = EXIT_FAILED if disk_error else parallel.exit_code(error)
                return refuse(error, debug=debug, tell=barrier.tell, code=code)
        return EXIT_DONE
    except BrokenPipeError:
        raise
    except Exception as error:
        if limit_reached(error):
            return refuse(error, debug=debug, code=EXIT_FAILED)
        traceback.print_exc()
        return EXIT_FAILED
    finally:
        parallel.leave()


def _of_this_process(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Drop SLURM's variables if srun did not start this process: a batch script has those of all its tasks."""
    if "SLURM_STEP_NUM_TASKS" in environ:
        return environ
    return {name: value for name, value in environ.items() if not name.startswith("SLURM_")}


def say(text: str, launch: Any) -> None:
    """Print a line to stderr, on the first rank."""
    if launch.rank == 0:
        print(printable(text), file=sys.stderr, flush=True)
