"""Shared by all commands: parsers, help text, errors on stderr, the start of ranks."""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ..files.atomic_io import error_text, own_output, write_result
from ..files.resource_limits import limit_reached
from ..files.terminal import WIDTH, printable, wrap
from ..study import StudyFailed
from ..train.stop import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_LONGEST = 1500
"""Longest line in characters, before escapes."""


class CommandParser(argparse.ArgumentParser):
    """The options of ``megatron-fp8 COMMAND``, including --debug. Bad options raise ValueError.

    Args:
        module: the docstring of the command's module: all but its first paragraph is the help.
        run_options: prefixes of options of the run's config that ``parse`` takes, such as '--model.'.
    """

    def __init__(self, command: str, module: str | None, run_options: tuple[str, ...] = ()):
        super().__init__(
            prog=f"megatron-fp8 {command}",
            description=fit_help((module or "").partition("\n\n")[2]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("--debug", action="store_true", help="show tracebacks of bad input")
        self._run_options = run_options

    def parse(self, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """(options, options of the run's config such as --model.fp8_pow2_scales=true)."""
        if not self._run_options:
            return self.parse_args(arguments), []
        options, rest = self.parse_known_args(arguments)
        for argument in rest:
            if not argument.startswith(self._run_options) or "=" not in argument:
                known = [f"{name}NAME" if name.endswith(".") else name for name in self._run_options]
                self.error(
                    f"{argument} is not an option (of the run's config {'=VALUE, '.join(known)}=VALUE may be given)"
                    f"{self.near(argument)}"
                )
        return options, rest

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; the error for an unknown option names the nearest known one."""
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self.near(rest[0])}")
        return options

    def near(self, argument: str) -> str:
        """'. Did you mean ...?' for an unknown option similar to a known one; else ''."""
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            return ""
        near = difflib.get_close_matches(name, self._option_string_actions, n=1)
        return f". Did you mean {near[0]}?" if near else ""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}{'' if message.endswith('?') else '.'} {self.prog} --help says more.")


def element_formats(text: str) -> str:
    """Check the value of --fp8."""
    from ..plan.settings import FP8_FORMATS
    from ..recipe import RECIPES

    if text not in FP8_FORMATS:
        hint = f"; {text!r} is a recipe: give it as --recipe" if text in RECIPES else ""
        raise argparse.ArgumentTypeError(f"{text!r} must be one of {', '.join(FP8_FORMATS)}{hint}")
    return text


class CheckpointParser(CommandParser):
    """The options of every command that reads a checkpoint."""

    def __init__(self, command: str, module: str | None):
        super().__init__(command, module, ("--model.", "--data.tokenizer", "--checkpoint.accept"))
        self.add_argument("checkpoint", help="a run's folder, a folder of checkpoints, or a checkpoint")
        self.add_argument("--config", metavar="FILE", help="the run's config, where the checkpoint has none")
        self.add_argument("--recipe", help="FP8 recipe, or bf16 (default: the one it was trained with)")
        formats = "element formats, hybrid or e4m3 (default: the run's)"
        self.add_argument("--fp8", type=element_formats, metavar="FORMATS", help=formats)


def warn_in_lines() -> None:
    """Print this package's warnings as one line each, and hide those of libraries."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch)(\.|$)")
    warnings.formatwarning = lambda message, *_, **__: f"warning: {printable(str(message))}\n"


def refuse(
    error: Exception,
    *,
    debug: bool = False,
    tell: Callable[[int, str, Callable[[], None]], None] = lambda code, line, say: say(),
    code: int = EXIT_BAD_INPUT,
) -> int:
    """Print an error in one line, with the limit that caused it and, if ``debug``, its traceback; return the exit code.

    Args:
        tell: takes (exit code, line, a function that prints the line); with several ranks it informs the others, and
        lets
            one rank print.
    """
    text = " ".join(str(error).split())
    if limit := limit_reached(error):
        text = f"{text.rstrip('.')}. {limit}" if text else limit
    if len(text) > _LONGEST:  # it may quote another user's file
        text = f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 2 :]}"
    line = printable(f"error: {text}")

    def say() -> None:
        if debug:
            traceback.print_exception(error)
        print(line, file=sys.stderr, flush=True)

    tell(code, line, say)
    return code


def run(
    parser: CommandParser, arguments: list[str], work: Callable[..., int | None], *, run_options: bool = False
) -> int:
    """Parse the options, call ``work(options)``, return its exit code or 0. ValueError means bad input, StudyFailed
    failure.

    Args:
        run_options: options of a run such as --model.fp8=hybrid may follow, and ``work`` takes them as a second argument.
    """
    warn_in_lines()
    try:
        parsed = parser.parse_known_args(arguments) if run_options else (parser.parse_args(arguments),)
        return work(*parsed) or EXIT_DONE
    except (ValueError, StudyFailed) as error:
        code = EXIT_FAILED if isinstance(error, StudyFailed) else EXIT_BAD_INPUT
        return refuse(error, debug="--debug" in arguments, code=code)


def check_output(option: str, path: str | Path) -> Path:
    """The path as a Path. Raises ValueError if no file can be written there, as far as that is known before the work."""
    path = Path(path)
    try:
        is_folder, in_folder = path.is_dir(), path.absolute().parent.is_dir()
    except OSError as error:
        raise write_error(option, path, error) from error
    if is_folder:
        raise ValueError(f"{option}={path} is a folder: give a file in it")
    if not in_folder:
        raise ValueError(f"{option}={path}: there is no such folder; make it first")
    return path


def check_outputs(files: Mapping[str, str | Path | None]) -> None:
    """``check_output`` of each option's file. Raises ValueError too if two are one file, of which one would be lost."""
    paths = [check_output(option, path) for option, path in files.items() if path is not None]
    replaced = [path.resolve() for path in paths if own_output(path) is None]
    if len(set(replaced)) < len(replaced):
        raise ValueError(f"{' and '.join(files)} name the same file: give each its own")


def write_error(option: str, path: Path, error: OSError) -> ValueError:
    """The error for a file that cannot be written."""
    return ValueError(f"{option}={path} cannot be written ({error_text(error)}): give another file")


def write_output(option: str, path: Path, text: str) -> None:
    """``write_result``. Raises ValueError if the file cannot be written."""
    try:
        write_result(path, text)
    except OSError as error:
        raise write_error(option, path, error) from error


def with_progress(items: Iterable[T], count: int, description: str = "tensors") -> Iterator[T]:
    """The items, with a progress bar on a terminal."""
    if not sys.stderr.isatty():
        return iter(items)
    from rich.console import Console
    from rich.progress import track

    return iter(track(items, description, count, console=Console(stderr=True)))


def text_rows(
    options: argparse.Namespace, restored: Any, launch: Any, count: int, length: int
) -> torch.Tensor:
    """int64 [count, length] on the model's device: sequences from all over the text of --data, or else the run's.

    Args:
        options: with ``data``, and ``config``, the run's config if the checkpoint has none.

    Raises ValueError if the text is missing, shorter than a sequence, or of another tokenizer.
    """
    import torch

    from ..train.data.datasets import check_data, check_tokenizer, find_data, holds_text, spread_sequences
    from ..train.launch.config_consistency import agree_on_inputs
    from ..train.resume.checkpoint_compat import check_imported

    section = restored.run.data
    if options.data:
        section.paths = options.data
        if options.config is None:  # a user's text is not copied to a checkpoint's cache folder
            section.cache_dir = None
    check_tokenizer(section, restored.tokenizer, restored.run.model.vocab_size or 0)
    if holds_text(section):
        check_imported(restored.run, restored.facts)
    prefixes = find_data(section, restored.tokenizer)
    agree_on_inputs("data", launch, prefixes)
    check_data(prefixes, restored.vocab_size)
    rows = torch.from_numpy(spread_sequences(prefixes, count, length, restored.vocab_size))
    return rows.to(next(restored.model.parameters()).device)


_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Disk errors during a command, which are no fault of its input."""


def run_command(
    parser: CommandParser,
    arguments: list[str],
    prepare: Callable[[argparse.Namespace, list[str], Any], Callable[[], int | None]],
) -> int:
    """Parse, call ``prepare(options, run options, launch)`` and the function that it returns; return its exit code or 0.

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
        warnings.simplefilter("ignore")
    barrier = launch.barrier
    assert barrier is not None
    try:
        with barrier:
            try:
                try:
                    options, run_options = parser.parse(arguments)
                    work = prepare(options, run_options, launch)
                except (RuntimeError, OSError, MemoryError) as error:
                    return refuse(error, debug=debug, tell=barrier.tell, code=parallel.exit_code(error))
                barrier.close()
                code = work() or EXIT_DONE
            except BrokenPipeError:  # the reader of the output has ended
                raise
            except (ValueError, OSError) as error:
                disk_error = isinstance(error, OSError) and error.errno in _DISK_ERRORS
                code = EXIT_FAILED if disk_error else parallel.exit_code(error)
                return refuse(error, debug=debug, tell=barrier.tell, code=code)
        return code
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


# -------------------------------------------------------------------------------------------------------------- help

_SECOND_COLUMN = re.compile(r"^(\s*\S.*?\s{2,})(\S.*)$")
_MOST_LEFT = 40  # a longer first column has its explanation below it


def fit_help(text: str, width: int = WIDTH) -> str:
    """The text with no line longer than ``width``, except for single long words.

    Prose is rewrapped. Indented lines stay unchanged if they fit. If they do not, a second column continues below
    itself, or below the first column if that is long; a command continues after a backslash.
    """
    lines: list[str] = []
    prose: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line and not line.startswith(" "):
            prose.append(line)
            continue
        lines += wrap(" ".join(prose), width=width).splitlines()
        prose = []
        lines += [line] if len(line) <= width else _wrap_indented(line, width)
    return "\n".join(lines[:-1])


def _wrap_indented(line: str, width: int) -> list[str]:
    columns = _SECOND_COLUMN.match(line)
    label, explanation = columns.groups() if columns else (line, "")
    if explanation and len(label) <= _MOST_LEFT:
        return wrap(explanation, label, " " * len(label), width).splitlines()
    indent = " " * 6
    command = wrap(label.rstrip(), "", indent, width - 2).replace("\n", " \\\n")
    return [*command.splitlines(), *wrap(explanation, indent, indent, width).splitlines()]
