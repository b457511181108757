"""`megatron-fp8 launch`: several ranks of a command or a script, on one node or several.

Starts several ranks of a command of megatron-fp8, or of a Python script, and ends as they end.

  megatron-fp8 launch --ranks 2 train --config tiny_gpt_cpu             two ranks on this machine
  megatron-fp8 launch train --config llama3_8b --data my_corpus         one for each GPU
  megatron-fp8 launch --ranks 8 --max-restarts 3 train ...              after a rank died: all again, from a checkpoint
  megatron-fp8 launch --ranks 2 examples/megatron_gpt.py                any script that torchrun could start

On several nodes, the same line on each but for --node-rank; HOST is node 0 as the others know it, PORT free there:

  megatron-fp8 launch --nodes 2 --node-rank 0 --master HOST:29500 --ranks 8 train ...
  megatron-fp8 launch --nodes 2 --node-rank 1 --master HOST:29500 --ranks 8 train ...

Ctrl-C, SIGTERM and SIGHUP make a training finish its iteration, save and end; Ctrl-C again, a second later, ends it at
once. Bad input is one line, said once, and is not tried again. A rank that dies is named.
Underneath is torch's elastic agent, which torchrun has too: ranks find the same environment variables.

Exit codes are the command's: 0 done, or stopped and saved; 1 failed; 2 bad input. 130 (Ctrl-C) and 143 (SIGTERM): ended
before there was anything to save.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
from pathlib import Path
from typing import Any

from ..files.resource_limits import usable_cores
from ..train.launch.environment import is_host
from ..train.stop import EXIT_BAD_INPUT, EXIT_FAILED
from .cli_common import CommandParser, refuse

_MOST = 1024
"""Most ranks on a node: more than any node has GPUs or cores."""


_OF_RANKS = ("train", "diagnose", "calibrate", "generate", "import")
_OWN = {"--ranks", "--max-restarts", "--logs", "--nodes", "--node-rank", "--master", "--stopped-code"}
_TEXTS = {"-h", "--help", "--keys"}


def main(arguments: list[str]) -> int:
    """Run `megatron-fp8 launch`; returns the exit code."""
    debug = False
    try:
        options = _parser().parse_args(arguments)
        debug = options.debug
        program = _program(options.command)
        _check(options)
        if program is None:
            from .main import main as run_here

            return run_here(options.command)
        return _launch(options, program)
    except ValueError as error:
        return refuse(error, debug=debug)


def _parser() -> CommandParser:
    parser = CommandParser("launch", __doc__)
    parser.usage = f"{parser.prog} [--ranks N] [options] COMMAND ..."
    add = parser.add_argument
    add("--ranks", metavar="N", type=int, help="on this node (default: one for each GPU, or 1)")
    add("--max-restarts", metavar="N", type=int, default=0, help="of all ranks, after one died (default 0)")
    add("--logs", metavar="DIR", type=Path, help="also copy each rank's output into files here")
    add("--nodes", metavar="N", type=int, default=1, help="each with a launch of its own (default 1)")
    add("--node-rank", metavar="R", type=int, help="of several nodes, which one this is: 0 to N - 1")
    add("--master", metavar="HOST:PORT", help="of several nodes, where node 0 listens")
    add("--stopped-code", metavar="CODE", type=int, default=0, help="of a stopped and saved run (default 0)")
    add("command", metavar="COMMAND", nargs=argparse.REMAINDER, help="with its options; or a script")
    return parser


def _program(command: list[str]) -> list[str] | None:
    """Arguments for Python; None if one process only prints help. Raises ValueError for an unknown command."""
    known = f"{', '.join(_OF_RANKS[:-1])} and {_OF_RANKS[-1]}"
    if not command:
        raise ValueError(
            f"launch needs a command: {known} run on several ranks; a script's path is possible too."
        )
    first, *rest = command
    if first in _OF_RANKS:
        if _TEXTS.intersection(rest):
            return None
        own_option = next((word for word in rest if word.partition("=")[0] in _OWN), None)
        if own_option is not None:
            raise ValueError(
                f"{own_option} is launch's own, and stands behind {first}: put it before {first}."
            )
        return ["-m", "megatron_fp8", *command]
    from .main import COMMANDS

    if first in COMMANDS:
        raise ValueError(f"launch {first}: {first} is one process: run megatron-fp8 {shlex.join(command)}.")
    if not Path(first).is_file():
        near = difflib.get_close_matches(first, _OF_RANKS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{first!r} is neither a command of several ranks ({known}) nor a script that is there.{hint}"
        )
    return command


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError for an invalid number or address."""
    if options.ranks is not None and not 1 <= options.ranks <= _MOST:
        raise ValueError(
            f"--ranks {options.ranks} must be from 1 to {_MOST}: how many processes this node starts."
        )
    if options.max_restarts < 0:
        raise ValueError(f"--max-restarts {options.max_restarts} must be 0 or more.")
    if not 0 <= options.stopped_code <= 255 or options.stopped_code in (EXIT_FAILED, EXIT_BAD_INPUT):
        raise ValueError(
            f"--stopped-code {options.stopped_code} must be from 3 to 255, or 0: 1 and 2 are failures."
        )
    if options.nodes < 1:
        raise ValueError(f"--nodes {options.nodes} must be at least 1.")
    if options.nodes == 1:
        for name in ("node_rank", "master"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} {getattr(options, name)} is for several nodes: add --nodes N, or leave"
                    " it out."
                )
        return
    if options.node_rank is None or options.master is None:
        raise ValueError(
            f"--nodes {options.nodes} needs --node-rank R (0 to {options.nodes - 1}, this node's) and --master HOST:PORT"
            " (where node 0 listens, the same on all)."
        )
    if not 0 <= options.node_rank < options.nodes:
        raise ValueError(
            f"--node-rank {options.node_rank} must be from 0 to {options.nodes - 1} with --nodes {options.nodes}."
        )
    _address(options.master)


def _address(master: str) -> tuple[str, int]:
    """(host, port). Raises ValueError."""
    host, colon, port = master.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (
        is_host(host)
        and colon
        and len(port) < 6
        and port.isascii()
        and port.isdigit()
        and 0 < int(port) < 2**16
    ):
        raise ValueError(
            f"--master {master} must be HOST:PORT, with a port from 1 to 65535: --master node0:29500."
        )
    return host, int(port)


def _launch(options: argparse.Namespace, program: list[str]) -> int:
    import torch

    from ..train.launch.launcher import LaunchSpec, launch, say

    place: dict[str, Any] = {}
    if options.nodes > 1:
        host, port = _address(options.master)
        place = {"nodes": options.nodes, "node": options.node_rank, "host": host, "port": port}
    gpus = torch.cuda.device_count()
    ranks, cores = options.ranks or gpus or 1, usable_cores()
    if not gpus and ranks > cores:
        say(f"note: {ranks} ranks share {cores} CPU cores and wait for each other: --ranks {cores} is faster")
    spec = LaunchSpec(
        [sys.executable, "-u", *program],
        ranks,
        **place,
        max_restarts=options.max_restarts,
        logs=options.logs,
        stopped_code=options.stopped_code,
    )
    try:
        return launch(spec, debug=options.debug)
    except torch.distributed.DistError as error:
        return refuse(error, debug=options.debug, code=EXIT_FAILED)
