"""Calls of C functions as bytes: written once, made by a program for any processor (tape.c), and looked at here.

A call has integers and buffers as arguments; buffers may hold the addresses of others. So ctypes and Python need not run
where the kernels do: under an emulator, or with AddressSanitizer.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_fp8.kernels.cpu.emulation import FLAGS, SOURCES

HERE = Path(__file__).parent
GUARDED = f"-include {HERE / 'guarded.h'}"
SANITISED = "-g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"


class Buffer:
    """Bytes at an address that the program chooses; `pointers`: offset in them -> the buffer whose address is there."""

    def __init__(
        self, data: torch.Tensor | ctypes.Structure | ctypes.Array[ctypes.Structure], out: bool = False
    ):
        if isinstance(data, torch.Tensor):
            assert data.is_contiguous()
            self.bytes = data.flatten().view(torch.uint8).numpy().tobytes() if data.numel() else b""
        else:
            self.bytes = bytes(data)
        self.out = out
        self.pointers: dict[int, Buffer] = {}


@dataclass
class Call:
    """One call. `check` says what is wrong with (the returned int64, the bytes of each buffer that is ``out``)."""

    name: str
    arguments: Sequence[int | Buffer | None]
    check: Callable[[int, list[bytearray]], str | None]
    what: str
    front: bool = False
    buffers: list[Buffer] = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = []
        waiting = [argument for argument in self.arguments if isinstance(argument, Buffer)]
        while waiting:
            one = waiting.pop(0)
            if one not in self.buffers:
                self.buffers.append(one)
                waiting += one.pointers.values()

    def packed(self) -> bytes:
        """As tape.c reads it."""
        at = {id(one): i for i, one in enumerate(self.buffers)}
        name = self.name.encode()
        parts = [_words(len(name)), name, _words(self.front, len(self.buffers))]
        for one in self.buffers:
            parts += [_words(len(one.bytes), one.out), one.bytes]
        pointers = [
            (at[id(one)], offset, at[id(to)]) for one in self.buffers for offset, to in one.pointers.items()
        ]
        parts += [
            _words(len(pointers)),
            *(_words(*pointer) for pointer in pointers),
            _words(len(self.arguments)),
        ]
        for argument in self.arguments:
            parts.append(
                _words(1, at[id(argument)]) if isinstance(argument, Buffer) else _words(0, argument or 0)
            )
        return b"".join(parts)


def _words(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def compile_for(compiler: str, flags: str, to: Path) -> Path:
    """A program of the kernels and tape.c; flags: what stands for -O3 -march=native of the kernels' own flags."""
    own = FLAGS.replace("-fPIC -shared", "").replace("-O3", "").replace("-march=native", flags)
    command = [*compiler.split(), *own.split(), "-rdynamic", *map(str, SOURCES), str(HERE / "tape.c")]
    done = subprocess.run(
        [*command, "-o", str(to), "-ldl", "-lm"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return to


def faults(program: Sequence[str | Path], calls: Sequence[Call], threads: int = 2) -> list[str]:
    """What is wrong with what a program gives for these calls; nothing if all is right."""
    tape = _words(len(calls)) + b"".join(call.packed() for call in calls)
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0",
    }
    done = subprocess.run([*map(str, program)], input=tape, capture_output=True, env=environment, timeout=300)
    found, at = [], 0
    for number, call in enumerate(calls):
        size = 8 + sum(len(one.bytes) for one in call.buffers if one.out)
        given = done.stdout[at : at + size]
        if len(given) < size:
            said = done.stderr.decode(errors="replace")[-3000:]
            return [
                *found,
                f"ended with {done.returncode} in or after call {number}, {call.name} {call.what}: {said}",
            ]
        at += size
        returned, start, outs = struct.unpack("<q", given[:8])[0], 8, []
        for one in (one for one in call.buffers if one.out):
            outs.append(bytearray(given[start : start + len(one.bytes)]))
            start += len(one.bytes)
        if (wrong := call.check(returned, outs)) is not None:
            found.append(f"{call.name} {call.what}: {wrong}")
    if done.returncode:
        found.append(f"exit code {done.returncode}: {done.stderr.decode(errors='replace')[-3000:]}")
    return found
