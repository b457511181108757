"""Stack dumps of this process's threads, with waits for other ranks.

A call that waits shows in Python's innermost frame: one of torch.distributed's functions, or a line that waits for a
handle (`.wait(`) or for a GPU (`.item()`, `.tolist()`, `synchronize(`), which are C and have no frame of their own.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py")
_WAITS = (".wait(", ".item()", ".tolist()", "synchronize(")
_COMPILERS = (
    *("torch/_dynamo/convert_frame.py", "torch/_inductor/graph.py", "torch/_inductor/async_compile.py"),
    *("triton/compiler/compiler.py", "triton/runtime/autotuner.py", "megatron_fp8/kernels/cpu/library.py"),
)
_ENGINE = "torch/autograd/graph.py"
_AROUND = ("/contextlib.py", "/typing_extensions.py")
"""Decorators, between a collective and who called it."""


class Place(NamedTuple):
    """Where a thread is. ``kind``: 'waits' for others, 'compiles', or is 'elsewhere'; ``text``: in words."""

    kind: str
    text: str


def place(frame: FrameType) -> Place:
    """Where the thread is whose innermost frame this is."""
    frames = list(_outwards(frame))
    code, line = frame.f_code, _line(frame)
    if code.co_filename.endswith(_COLLECTIVES):
        chain: list[FrameType] = []
        for one in frames:
            if not one.f_code.co_filename.endswith(_COLLECTIVES):
                break
            chain.append(one)
        names = [one.f_code.co_name for one in reversed(chain) if one.f_code.co_name != "wrapper"]
        outside = (one for one in frames[len(chain) :] if not one.f_code.co_filename.endswith(_AROUND))
        caller = next(outside, chain[-1])
        # At the moment in which a collective is entered there is its decorator alone.
        return Place("waits", f"{names[0] if names else 'a collective'}, called in {_spot(caller)}")
    if any(mark in line for mark in _WAITS):
        return Place("waits", f"{line!r} in {_spot(frame)}")
    if any(one.f_code.co_filename.endswith(_COMPILERS) for one in frames):
        return Place("compiles", _spot(frame))
    return Place("elsewhere", _spot(frame))


def waits(frame: FrameType) -> bool:
    """Whether `place` would say 'waits'; a few microseconds."""
    return frame.f_code.co_filename.endswith(_COLLECTIVES) or any(mark in _line(frame) for mark in _WAITS)


def place_of(thread: int) -> Place:
    """Where the thread with this identity is; while it runs a backward on a GPU, where torch's own thread is."""
    frames = sys._current_frames()
    mine = frames[thread]
    if mine.f_code.co_filename.endswith(_ENGINE):
        known = {one.ident for one in threading.enumerate()}
        mine = next((frame for ident, frame in frames.items() if ident not in known), mine)
    return place(mine)


def place_of_error(trace: TracebackType | None) -> Place | None:
    """Where an error was raised."""
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return place(trace.tb_frame)


def stacks() -> str:
    """Every thread's stack, innermost first, the names of threads, and how many collectives each group has begun.

    With torch's flight recorder on (TORCH_FR_BUFFER_SIZE=256), also the collectives that are not done.
    """
    lines = [f"thread {one.ident:#018x} is {one.name!r}" for one in threading.enumerate()]
    lines += [f"group {name}: {count} collectives begun" for name, count in _begun()]
    lines += [f"not done: {json.dumps(entry)}" for entry in _not_done()]
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return "\n".join([*lines, "", file.read().decode(errors="replace")])


def _begun() -> Iterator[tuple[str, int]]:
    """The groups that this rank is in, and their numbers of collectives, which all ranks of a group should share."""
    if not dist.is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        ranks = dist.get_process_group_ranks(group)
        shown = f"{ranks[:8]}{' and more' if len(ranks) > 8 else ''}"
        yield (
            f"{group.group_name} ({group.group_desc}, ranks {shown})",
            group._get_sequence_number_for_group(),  # type: ignore[attr-defined]
        )


def _not_done() -> Iterator[dict[str, Any]]:
    """Of torch's flight recorder: collectives that were begun and are not done."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    for entry in json.loads(dump()).get("entries", []) if dump else []:
        if not entry.get("retired", True):
            kept = ("process_group", "collective_seq_id", "profiling_name", "state", "input_sizes")
            yield {key: entry[key] for key in kept if key in entry}


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line(frame: FrameType) -> str:
    # A frame that another thread looks at may be between two lines, and then has none.
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0).strip()


def _spot(frame: FrameType) -> str:
    """'core/tensor_parallel/mappings.py:33 (_reduce)'."""
    short = "/".join(Path(frame.f_code.co_filename).parts[-3:])
    return f"{short}:{frame.f_lineno or frame.f_code.co_firstlineno} ({frame.f_code.co_name})"
