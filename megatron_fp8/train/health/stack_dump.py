"""Stack dumps of this process's threads, with waits for other ranks.

A waiting call shows in Python's innermost frame: a function of torch.distributed, or a line that waits for a handle
(`.wait(`) or a GPU (`.item()`, `.tolist()`, `synchronize(`); those are C functions without a frame of their own.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...files.resource_limits import limit_reached
from ..stop import TrainingFailed

_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py")
_WAITS = (".wait(", ".item()", ".tolist()", "synchronize(")
_COMPILERS = (
    *("torch/_dynamo/convert_frame.py", "torch/_inductor/graph.py", "torch/_inductor/async_compile.py"),
    *("triton/compiler/compiler.py", "triton/runtime/autotuner.py", "megatron_fp8/kernels/cpu/library.py"),
)
_PEER_ERRORS = re.compile(
    r"gloo/transport|Connection (closed|reset|refused)|Broken pipe|Timed out|timed out|timeout|remote process"
)
_ENGINE = "torch/autograd/graph.py"
_DECORATORS = ("/contextlib.py", "/typing_extensions.py")
"""Files of decorators, whose frames lie between a collective and its caller."""


class StackPlace(NamedTuple):
    """Where a thread is. ``kind``: 'waits' (for other ranks), 'compiles' or 'elsewhere'; ``text``: description."""

    kind: str
    text: str


def place(frame: FrameType) -> StackPlace:
    """Where a thread is, from its innermost frame."""
    frames = list(_callers(frame))
    code, line = frame.f_code, _line(frame)
    if code.co_filename.endswith(_COLLECTIVES):
        chain: list[FrameType] = []
        for outer in frames:
            if not outer.f_code.co_filename.endswith(_COLLECTIVES):
                break
            chain.append(outer)
        names = [outer.f_code.co_name for outer in reversed(chain) if outer.f_code.co_name != "wrapper"]
        outside = (
            outer for outer in frames[len(chain) :] if not outer.f_code.co_filename.endswith(_DECORATORS)
        )
        caller = next(outside, chain[-1])
        # A thread that just enters a collective has only its decorator's frame.
        return StackPlace("waits", f"{names[0] if names else 'a collective'}, called in {_location(caller)}")
    if any(mark in line for mark in _WAITS):
        return StackPlace("waits", f"{line!r} in {_location(frame)}")
    if any(outer.f_code.co_filename.endswith(_COMPILERS) for outer in frames):
        return StackPlace("compiles", _location(frame))
    return StackPlace("elsewhere", _location(frame))


def waits(frame: FrameType) -> bool:
    """Whether `place` would return 'waits'; takes a few microseconds."""
    return frame.f_code.co_filename.endswith(_COLLECTIVES) or any(mark in _line(frame) for mark in _WAITS)


def place_of(thread: int) -> StackPlace:
    """Position of the thread with this identity; in a backward on a GPU, position of torch's own thread."""
    frames = sys._current_frames()
    frame = frames[thread]
    if frame.f_code.co_filename.endswith(_ENGINE):
        known = {other.ident for other in threading.enumerate()}
        frame = next((inner for ident, inner in frames.items() if ident not in known), frame)
    return place(frame)


def place_of_error(trace: TracebackType | None) -> StackPlace | None:
    """Position at which an error was raised."""
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return place(trace.tb_frame)


def stacks() -> str:
    """Every thread's stack, innermost first, the names of threads, and the number of collectives begun in each group.

    With torch's flight recorder (TORCH_FR_BUFFER_SIZE=256), unfinished collectives too.
    """
    lines = [f"thread {thread.ident:#018x} is {thread.name!r}" for thread in threading.enumerate()]
    lines += [f"group {name}: {count} collectives begun" for name, count in _collectives_begun()]
    lines += [f"not done: {json.dumps(entry)}" for entry in _not_done()]
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return "\n".join([*lines, "", file.read().decode(errors="replace")])


def _collectives_begun() -> Iterator[tuple[str, int]]:
    """This rank's groups and their numbers of collectives, which should be equal on all ranks of a group."""
    if not dist.is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        ranks = dist.get_process_group_ranks(group)
        ranks_text = f"{ranks[:8]}{' and more' if len(ranks) > 8 else ''}"
        yield (
            f"{group.group_name} ({group.group_desc}, ranks {ranks_text})",
            group._get_sequence_number_for_group(),  # type: ignore[attr-defined]
        )


def _not_done() -> Iterator[dict[str, Any]]:
    """Collectives in torch's flight recorder that were begun and are not done."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    for entry in json.loads(dump()).get("entries", []) if dump else []:
        if not entry.get("retired", True):
            keys = ("process_group", "collective_seq_id", "profiling_name", "state", "input_sizes")
            yield {key: entry[key] for key in keys if key in entry}


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line(frame: FrameType) -> str:
    # Another thread's frame may be between two lines, and then has no line number.
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0).strip()


def _location(frame: FrameType) -> str:
    """'core/tensor_parallel/mappings.py:33 (_reduce)'."""
    short = "/".join(Path(frame.f_code.co_filename).parts[-3:])
    return f"{short}:{frame.f_lineno or frame.f_code.co_firstlineno} ({frame.f_code.co_name})"


def explain_lost_rank(
    error: BaseException, phase: str, ranks: str, saved: Path | None
) -> TrainingFailed | None:
    """Explain an error of a collective if another rank that ended, or does not answer, caused it; else None.

    Args:
        phase: this rank's phase, such as 'iteration 12'.
        ranks: which ranks differ, if the watchdog knows; else ''.
        saved: the newest checkpoint.
    """
    what = _peer_problem(error)
    if what is None:
        return None
    cause = ranks or "it or its node has failed: its log, torchrun or srun have the cause"
    back = f"goes on from {saved}" if saved else "starts from the beginning, since there is no checkpoint"
    return TrainingFailed(f"training failed: {phase}: {what}: {cause}. --resume=auto {back}.")


def explain_lost_rank_at_start(error: BaseException) -> TrainingFailed | None:
    """The same for an error before the first step, where earlier lines have named the ranks."""
    what = _peer_problem(error)
    if what is None:
        return None
    return TrainingFailed(
        f"before the first step {what}: one is stopped, hangs or has ended, as the lines above or its log say."
    )


def _peer_problem(error: BaseException) -> str | None:
    if not isinstance(error, (RuntimeError, dist.DistError)) or not _PEER_ERRORS.search(str(error)):
        return None
    if limit_reached(error):  # this process's own limit: gloo's sockets are files too
        return None
    place = place_of_error(error.__traceback__)
    if place is None or place.kind != "waits":
        return None
    (line, *_) = str(error).splitlines()
    cause = re.sub(r"^\[[^]]*\] *", "", line).split(". ")[0]
    late = re.search("[Tt]imed out|timeout", cause)
    problem = "other ranks did not come in time" if late else "the connection to another rank was lost"
    return f"{problem} ({cause}, in {place.text})"
