"""The command line: `megatron-fp8 COMMAND`, `python -m megatron_fp8 COMMAND`. Commands load on use.

usage: megatron-fp8 COMMAND ...

FP8 training for Megatron-Core models.

  train      train a GPT on real text
  launch     several ranks of train, generate, import, ... or of a script
  report     summarize a run: precision by layer, loss, advice; also as HTML
  compare    train BF16 and several recipes, and say how they differ
  diagnose   what FP8 costs a run, by layer and GEMM, and overrides against it
  inspect    what is in a checkpoint
  calibrate  measure a trained model's activations, for static scales
  generate   continue a prompt
  export     write a checkpoint for transformers and vLLM
  parity     whether an exported directory computes what its run trained
  import     make a run of a Llama, Qwen, Mixtral or DeepSeek-V3 directory
  tokenizer  train a tokenizer on your text
  formats    the numbers behind FP8: values, range, error, scaling
  bench      time FP8 against BF16 here; --tune finds GEMMs for which FP8 pays
  estimate   what a run will need, before it is built
  doctor     what this machine can run, what it lacks for a run, what runs where

Begin with: megatron-fp8 train --config tiny_gpt_cpu
Then:       megatron-fp8 report runs/tiny_gpt_cpu

`megatron-fp8 COMMAND --help` says more, with commands to copy;
`megatron-fp8 --version` says what is installed. Several processes:
megatron-fp8 launch --ranks 2 train --config tiny_gpt_cpu
"""

from __future__ import annotations

import difflib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module, metadata
from typing import Any

from .. import __version__
from ..files.atomic_io import error_text
from ..files.resource_limits import limit_reached, locale_limit
from ..train.stop import EXIT_FAILED
from .cli_common import refuse

USAGE = (__doc__ or "").partition("\n\n")[2]
_NAMES = (
    "train launch report compare diagnose inspect calibrate generate export parity import tokenizer formats"
    " bench estimate doctor"
)
COMMANDS = {
    name: {"inspect": "inspect_checkpoint", "import": "import_"}.get(name, name) for name in _NAMES.split()
}
"""Command -> module in this folder, whose ``main`` takes arguments and returns the exit code."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit code: 0 done, 1 failed or lost output, 2 bad input, 130 interrupted by Ctrl-C."""
    open_closed_streams()
    output, code = Output(), 0
    try:
        with output.guarded():
            code = _run(sys.argv[1:] if arguments is None else arguments)
        return code or int(output.lost)
    except SystemExit:  # argparse, after --help
        if output.lost:
            return 1
        raise
    except BrokenPipeError:  # the reader of the output has ended, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code  # a failure stays one even if its message has no reader
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # the shells' number for SIGINT


def _versions() -> list[str]:
    """Versions of this package, torch and megatron-core, one per line, without importing them."""
    lines = [f"megatron_fp8 {__version__}"]
    for name in ("torch", "megatron-core"):
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed")
    return lines


def _without_megatron(command: str) -> Exception:
    from ..mcore.environment import HOW_TO_GET

    return ValueError(f"{command} needs megatron-core, which is not installed. To get it: {HOW_TO_GET}.")


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(*_versions(), sep="\n")
        return 0
    command, rest = arguments[0], arguments[1:]
    for argument in rest:
        if not argument.isascii() and (limit := locale_limit(argument)):
            return refuse(ValueError(f"{os.fsencode(argument).decode()!r} is not ASCII. {limit}"))
    if command in COMMANDS:
        try:
            run: Callable[[list[str]], int] = import_module(f".{COMMANDS[command]}", __package__).main
            return run(rest)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "megatron":
                raise
            return refuse(_without_megatron(command))
        except (ImportError, OSError, RuntimeError, ValueError, MemoryError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
                return refuse(ValueError(f"{str(error.filename)!r} is longer than a file's name may be"))
            debug = "--debug" in rest
            if limit_reached(error) is not None:
                return refuse(error, debug=debug)
            if (
                isinstance(error, OSError) and error.filename is not None
            ):  # a full disk, a folder of another user
                failed = RuntimeError(f"{str(error.filename)!r}: {error_text(error)}")
                return refuse(failed.with_traceback(error.__traceback__), debug=debug, code=EXIT_FAILED)
            raise
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return refuse(ValueError(f"{command!r} is not a command: they are {', '.join(COMMANDS)}.{hint}"))


class _Stream:
    """A text stream that passes write errors to a function instead of raising them."""

    def __init__(self, stream: Any, fails: Callable[[OSError], None]) -> None:
        self._stream, self._fails = stream, fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or drop text that cannot be written. Returns the number of characters."""
        with self._errors_passed_on():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._errors_passed_on():
            self._stream.flush()

    @contextmanager
    def _errors_passed_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._fails(error)


@contextmanager
def call_at_broken_pipe(left: Callable[[], None]) -> Iterator[None]:
    """Context: ``left`` is called when the reader of standard output has ended, as `| head`, or a `tee` at Ctrl-C.

    Later output is discarded.
    """
    out: Any = sys.stdout

    def fails(error: OSError) -> None:
        if not isinstance(error, BrokenPipeError):
            raise error
        _discard(out)
        left()

    with redirect_stdout(_Stream(out, fails)):
        yield


def open_closed_streams() -> None:
    """The null device in place of each standard stream that was closed at the start (`>&-`): Python has None for it."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            # With the stream's own number, and for child processes too: their first file would get it, and their errors.
            null = os.open(os.devnull, os.O_RDWR)  # the smallest number that is free
            os.set_inheritable(null, null == number)
            stream = os.fdopen(null, mode)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class Output:
    """Guards sys.stdout and sys.stderr. `lost`: some output could not be written."""

    def __init__(self) -> None:
        self.lost = False

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Context: both streams without write errors; at the end unwritable output is dropped, also at Python's exit."""
        out, err = sys.stdout, sys.stderr
        stderr: Any = _Stream(err, lambda error: self._mark_lost())
        stdout: Any = _Stream(out, lambda error: self._report(error, stderr))
        try:
            with redirect_stdout(stdout), redirect_stderr(stderr):
                yield
                stdout.flush()
        finally:
            if self.lost:
                for stream in (out, err):
                    _discard(stream)

    def _mark_lost(self) -> None:
        self.lost = True

    def _report(self, error: OSError, stderr: Any) -> None:
        if isinstance(error, BrokenPipeError):
            raise error
        if not self.lost:
            self.lost = True
            print(
                f"error: output cannot be written ({error.strerror}): send it where there is room.",
                file=stderr,
                flush=True,
            )


def _discard(stream: Any) -> None:
    """Flush a stream; if that fails, discard its buffer."""
    try:
        stream.flush()
    except OSError:
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, stream.fileno())
        os.close(null_device)
