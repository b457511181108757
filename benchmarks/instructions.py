"""How many instructions the Triton kernels take a value, counted in their machine code: no GPU is needed, and none runs.

    TRITON_INTERPRET=0 python -m benchmarks.instructions [--write] [--only SwiGLU]

Memory is meant to be what a quantizing kernel waits for. It is, if a multiprocessor can issue the kernel's instructions
in less time than memory takes to move its bytes. Both can be counted. Every kernel that a training step launches is
compiled for compute capability 9.0 (H100, H200) and 10.0 (B200), disassembled, and its hot path counted (sass.py).

The model, for an H200 (and a B200):

* Issue time: instructions of all warps over 132 (148) multiprocessors x 4 schedulers x 1 instruction a cycle, as if every
  cycle issued one: a bound that no kernel reaches.
* Pipe time: the same instructions, where the busiest of a multiprocessor's pipes decides. Lanes a cycle: 128 for float32
  and packed 16-bit arithmetic; 64 for integers, logic, shifts, comparisons, minima and maxima, byte permutations and
  conversions to FP8 and BF16 (CUDA's programming guide, throughput of arithmetic instructions); 16 for exponentials,
  reciprocals and other conversions; 32 for shuffles and addresses of loads and stores. Shared memory moves 128 bytes a
  cycle, conflicts apart.
* Memory time: the bytes that have to be moved, over 4.3 TB/s (H200, a copy; B200: the same share of its 8 TB/s).
* Programs a multiprocessor: by registers (65,536), shared memory (227 KB) and threads (2,048).

The goal: issue time at most 0.75 of memory time, nothing spilled, two programs a multiprocessor. Every kernel meets it on
an H200; on a B200, whose memory is faster, some do not. NVFP4's are counted for a B200 alone, which multiplies their
codes. These are counts, not measurements.

block_products.py has the block-scaled product, which tensor cores bound and not memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.common import environment, table, write_results
from benchmarks.support.machine_code import HotPath, blocks_of, disassembled, hot_path

TOKENS, HIDDEN, FFN = 8192, 4096, 14336
BF16 = torch.bfloat16
GOAL = 0.75


@dataclass(frozen=True)
class Device:
    """What the model knows of a GPU: cycles a second are its boost clock's, bytes a second a copy's."""

    name: str
    architecture: int
    multiprocessors: int
    clock: float
    bandwidth: float


DEVICES = (Device("H200", 90, 132, 1.98e9, 4.3e12), Device("B200", 100, 148, 1.965e9, 7.2e12))

INTEGER = (
    "IADD3", "LOP3", "SHF", "PRMT", "SEL", "ISETP", "IMNMX", "VIMNMX", "VIMNMX3", "FMNMX", "FMNMX3", "HMNMX2", "FSETP",
    "FSEL", "HSETP2", "LEA", "IABS", "PLOP3", "F2FP", "VIADD", "VIADDMNMX", "P2R", "R2P", "SGXT", "FCHK", "CS2R", "SHL",
)  # fmt: skip
PIPES = {
    "float": (128, ("FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2", "MOV")),
    "integer": (64, INTEGER),
    "multiply-add": (64, ("IMAD",)),
    "load, store, shuffle": (32, ("SHFL", "LDG", "STG", "LDS", "STS", "ATOMG", "RED", "LDSM", "STSM", "LDC")),
    "special": (16, ("MUFU", "F2F", "F2I", "I2F", "POPC", "FLO")),
}
"""Lanes a cycle of a multiprocessor's pipes, and their opcodes. Others (branches, barriers, uniform ones) take none."""


@dataclass(frozen=True)
class Work:
    """A kernel of a training step.

    Attributes:
        launch: what launches it, among others.
        kernel: its name.
        values: of the matrix that it makes.
        loaded, stored: bytes a value that have to be moved.
        ways: bytes a value that a program loads: where programs differ, of each kind, all equally frequent.
        loop_bytes: bytes a thread that a loop loads, if it has one.
        architecture: the oldest that launches it.
    """

    name: str
    launch: Callable[[], Any]
    kernel: str
    values: int
    loaded: float
    stored: float
    ways: tuple[float, ...]
    loop_bytes: int = 0
    architecture: int = 90


@dataclass(frozen=True)
class Count:
    """What was counted of a kernel, for one device. Times are in microseconds."""

    name: str
    device: str
    instructions: float
    issue: float
    pipe: float
    busiest: str
    memory: float
    bytes: float
    shared: float
    registers: int
    spilled: int
    programs: int

    @property
    def ratio(self) -> float:
        """Issue time over memory time."""
        return self.issue / self.memory

    @property
    def meets(self) -> bool:
        """Whether it is as the goal says."""
        return self.ratio <= GOAL and not self.spilled and self.programs >= 2


def works() -> list[Work]:
    """Every kernel that training runs on BF16, at the shapes of an 8B model and 8192 tokens."""
    from megatron_fp8.kernels.delayed_update import update_delayed
    from megatron_fp8.kernels.fused_quantize import (
        RmsNorm,
        Swiglu,
        SwigluGradient,
        row_rstd,
        swiglu_weight_grad,
    )
    from megatron_fp8.kernels.gemm_layouts import transpose
    from megatron_fp8.kernels.param_cast import piece_amax, piece_cast
    from megatron_fp8.kernels.quantize import quantize_blocks
    from megatron_fp8.kernels.tiles import StoredMatrix
    from megatron_fp8.numerics.formats import E4M3, E5M2
    from megatron_fp8.state.amax_history import AmaxRingBuffer

    x, dy = empty(TOKENS, HIDDEN, dtype=BF16), empty(TOKENS, FFN, dtype=BF16)
    wide, gamma = empty(TOKENS, 2 * FFN, dtype=BF16), empty(HIDDEN, dtype=BF16)
    plain, ffn, weight = TOKENS * HIDDEN, TOKENS * FFN, HIDDEN * HIDDEN
    master, blocks = empty(weight), empty(HIDDEN // 128, HIDDEN // 128)
    shape, bytes_ = (HIDDEN, HIDDEN), empty(weight, dtype=torch.uint8)
    slots, many, rings = (
        empty(1024),
        empty(1024, dtype=torch.int64),
        AmaxRingBuffer(1024, 1024, torch.device("meta")),
    )
    return [
        *of_source("", lambda: StoredMatrix(x), E4M3, plain, 2.0, (2.0,)),
        *of_source("norm, ", lambda: RmsNorm(x, row_rstd(x, 1e-5), gamma), E4M3, plain, 2.0, (2.0,)),
        *of_source("SwiGLU, ", lambda: Swiglu(wide), E4M3, ffn, 4.0, (4.0,)),
        # Two matrices of n columns and one of 2 n; a tile of the one half reads all three, of the other two.
        *of_source("SwiGLU backward, ", lambda: SwigluGradient(dy, wide), E5M2, 2 * ffn, 3.0, (6.0, 4.0)),
        Work(
            "weight, 128x128",
            lambda: quantize_blocks(x, E4M3, block=128, square=True, record=recording()),
            "quantize_tiles", plain, 2.0, 2.0, (2.0,),
        ),
        Work(
            "weight, 128x128, as MX",
            lambda: quantize_blocks(x, E4M3, block=128, square=True, tiled=True, record=recording()),
            "quantize_tiles", plain, 2.0, 2.0 + 2 / 32, (2.0,), architecture=100,
        ),
        Work(
            "norm's statistic", lambda: row_rstd(x, 1e-5), "_row_rstd", plain, 2.0, 0.0, (2.0,),
            loop_bytes=8 * HIDDEN // 128 * 2,
        ),
        Work(
            "SwiGLU's weight gradient", lambda: swiglu_weight_grad(dy, wide), "_weight_grad", ffn, 6.0, 0.0, (6.0,),
            loop_bytes=8 * FFN // 128 * 6,
        ),
        Work(
            "master's amax, 128x128", lambda: piece_amax(master, 0, shape, BF16, blocks, empty()),
            "_piece_amax", weight, 4.0, 0.0, (4.0,),
        ),
        Work(
            "master's cast, 128x128", lambda: piece_cast(master, 0, shape, BF16, blocks, bytes_, E4M3),
            "_piece_cast", weight, 4.0, 1.0, (4.0,),
        ),
        Work(
            "codes turned", lambda: transpose(empty(TOKENS, HIDDEN, dtype=torch.uint8)), "_transpose", plain,
            1.0, 1.0, (1.0,),
        ),
        Work(
            "1024 scales of 1024 amaxes each",
            lambda: update_delayed(slots, slots, many, many, rings.rows, rings.maxima, slots, length=1024),
            "_update", 1024 * 64, 4.0, 0.0, (4.0,),
        ),
        *four_bits(x, plain),
    ]  # fmt: skip


def four_bits(x: torch.Tensor, values: int) -> list[Work]:
    """NVFP4, whose casts write half a byte and a sixteenth a value. Each direction by itself: of both, each of two
    programs makes one of the same tile, and the second reads it from the L2 cache."""
    from megatron_fp8.kernels.fp4_quantize import Draws, cast, find_amaxes
    from megatron_fp8.numerics.cast import RandomKey

    layout: dict[str, Any] = {"tiled": True, "pad_to": 32, "room": 16}
    draws = Draws(RandomKey(7, 6, 5, 4), 0, HIDDEN)

    def work(name: str, direction: Any, **how: Any) -> Work:
        def launch() -> Any:
            return cast(x, direction, empty(2), **how, **layout)

        return Work(f"NVFP4, {name}", launch, "cast_fp4", values, 2.0, 9 / 16, (2.0,), architecture=100)

    return [
        Work(
            "NVFP4 amaxes, transformed", lambda: find_amaxes(x, transformed=True, nonfinite=empty(), running=empty()),
            "find_fp4_amaxes", values, 2.0, 0.0, (2.0,), architecture=100,
        ),
        work("rows", "rowwise"),
        work("columns, transformed", "columnwise", transformed=True),
        work("rows, stochastic", "rowwise", draws=draws),
        work("columns, transformed, stochastic", "columnwise", transformed=True, draws=draws),
        work("weight's rows, 16x16", "rowwise", square=True),
        work("weight's columns, 16x16", "columnwise", square=True),
    ]  # fmt: skip


def of_source(
    what: str, make: Callable[[], Any], fmt: Any, values: int, loaded: float, ways: tuple[float, ...]
) -> list[Work]:
    """What the recipes do with a matrix that is there, or is computed by who quantizes it."""
    from megatron_fp8.kernels.quantize import (
        measure,
        quantize_blocks,
        quantize_rows,
        quantize_tensor,
        write_matrix,
    )

    def rows() -> Any:
        source = make()
        return quantize_rows(source, fmt, empty(source.rows), empty(source.cols))

    def work(
        name: str, launch: Callable[[], Any], kernel: str, stored: float, architecture: int = 90
    ) -> Work:
        if kernel == "find_amaxes" and len(ways) > 1:  # both halves of a gradient at once
            return Work(what + name, launch, "find_gradient_amaxes", values, loaded, stored, (loaded,))
        return Work(what + name, launch, kernel, values, loaded, stored, ways, architecture=architecture)

    found = [
        work("delayed", lambda: quantize_tensor(make(), fmt, scale=empty(), record=recording()), "cast_tensor", 2.0),
        work("tensorwise amax", lambda: measure(make(), record=recording()), "find_amaxes", 0.0),
        work("tensorwise cast", lambda: quantize_tensor(make(), fmt, amax=empty()), "cast_tensor", 2.0),
        work(
            "rowwise amaxes", lambda: measure(make(), rows=True, cols=True, record=recording()), "find_amaxes", 0.0
        ),
        work("rowwise casts", rows, "cast_rows", 2.0),
        work(
            "blockwise", lambda: quantize_blocks(make(), fmt, block=128, record=recording()),
            "quantize_tiles", 2.0 + 2 * 4 / 128,
        ),
        work(
            "blockwise, as MX", lambda: quantize_blocks(make(), fmt, block=128, tiled=True, record=recording()),
            "quantize_tiles", 2.0 + 2 / 32, 100,
        ),
        work(
            "MX", lambda: quantize_blocks(make(), fmt, block=32, kind="e8m0", record=recording()),
            "quantize_tiles", 2.0 + 2 / 32,
        ),
    ]  # fmt: skip
    return found + ([work("written", lambda: write_matrix(make()), "write_values", 2.0)] if what else [])


def recording() -> Any:
    """A slot."""
    from megatron_fp8.kernels.quantize import Record

    return Record(empty(), empty())


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def counted(work: Work, device: Device) -> Count:
    """Compile a kernel for a device and count.

    Raises:
        ValueError: the hot path found does not move the kernel's bytes.
    """
    from benchmarks.support.compiled import compiled

    launches = [launch for launch in compiled(work.launch, device.architecture) if launch.name == work.kernel]
    launch = launches[-1]
    text = disassembled(launch.cubin)
    threads = 32 * launch.warps * launch.programs
    path = path_of(work, text, work.values / threads)
    moved = path.bytes_of("LDG"), path.bytes_of("STG")
    for what, least, here in zip(("loads", "stores"), (work.loaded, work.stored), moved, strict=True):
        if here * threads < 0.9 * least * work.values:
            raise ValueError(
                f"{work.name}: the path {what} {here * threads / work.values:.2f} bytes a value, not {least}: "
                "it leaves out what moves data"
            )
    schedulers = device.multiprocessors * 4 * 32 * device.clock
    pipes = pipes_of(path)
    busiest = max(pipes, key=lambda name: pipes[name])
    spilled = sum(line.count("STL") + line.count("LDL") for line in text.splitlines())
    return Count(
        name=work.name,
        device=device.name,
        instructions=path.issued * threads / work.values,
        issue=path.issued * threads / schedulers * 1e6,
        pipe=pipes[busiest] * threads / 32 / (device.multiprocessors * device.clock) * 1e6,
        busiest=busiest,
        memory=(work.loaded + work.stored) * work.values / device.bandwidth * 1e6,
        bytes=work.loaded + work.stored,
        shared=(path.count("LDS", "STS", "LDSM", "STSM", "SHFL")) * threads / work.values,
        registers=launch.resources["REG"],
        spilled=spilled,
        programs=programs(launch.resources["REG"], launch.shared, launch.warps),
    )


def path_of(work: Work, text: str, values: float) -> HotPath:
    """The hot path of a kernel's machine code, the mean of its ways; ``values``: of a thread."""
    blocks = blocks_of(text)
    total: dict[str, float] = {}
    for loaded in work.ways:
        path = hot_path(blocks, work.loop_bytes, 0 if work.loop_bytes else round(loaded * values))
        for operation, count in path.operations.items():
            total[operation] = total.get(operation, 0.0) + count / len(work.ways)
    return HotPath(total)


def pipes_of(path: HotPath) -> dict[str, float]:
    """Cycles that each of a multiprocessor's pipes needs for one warp."""
    cycles = {name: path.count(*opcodes) * 32 / lanes for name, (lanes, opcodes) in PIPES.items()}
    # The pipe of IMAD is one of the two that float32 has.
    alone = cycles.pop("multiply-add")
    cycles["float"] = max(cycles["float"] + alone / 2, alone)
    return cycles | {"issue": path.issued / 4, "shared memory": 32 * path.bytes_of("LDS", "STS") / 128}


def programs(registers: int, shared: int, warps: int) -> int:
    """How many programs a multiprocessor holds at once."""
    by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = 227 * 1024 // (shared + 1024)
    return min(by_registers, by_shared, 2048 // (32 * warps), 32)


def rows_of(counts: list[Count]) -> list[list[str]]:
    """The table's cells."""
    return [
        [
            c.name,
            f"{c.instructions:.1f}",
            f"{c.shared:.2f}",
            f"{c.bytes:.2f}",
            f"{c.issue:.1f}",
            f"{c.memory:.1f}",
            f"{c.ratio:.2f}",
            f"{c.pipe:.1f} {c.busiest}",
            str(c.registers),
            str(c.spilled),
            str(c.programs),
            "yes" if c.meets else "no",
        ]
        for c in counts
    ]


HEADER = [
    "kernel", "instructions a value", "shared and shuffles", "bytes a value", "issue us", "memory us", "ratio", "pipe us",
    "registers", "spills", "programs", "goal",
]  # fmt: skip


def main() -> int:
    """Count, print, write; 1 where a kernel misses the goal on an H200."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/instructions.*")
    parser.add_argument("--only", default="", help="kernels whose name has this in it")
    parser.add_argument("--device", default="", help="H200 or B200; both if not given")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("unset TRITON_INTERPRET: kernels are compiled here")
    counts, parts = [], ["Counted in machine code; no GPU ran it, and nothing here is a measurement."]
    for device in DEVICES:
        if args.device in device.name:
            mine = [
                counted(w, device)
                for w in works()
                if args.only in w.name and w.architecture <= device.architecture
            ]
            counts += mine
            parts.append(f"## {device.name}, compute capability {device.architecture // 10}.0")
            parts.append(table(HEADER, rows_of(mine)))
    body = "\n\n".join(parts)
    print(body, flush=True)
    if args.write:
        record = environment(["triton"]) | {"measured": "counted, not measured"}
        data = [asdict(c) | {"ratio": c.ratio, "meets": c.meets} for c in counts]
        command = "python -m benchmarks.instructions --write"
        write_results(
            "instructions", "Instructions a value of the Triton kernels", command, record, body, data
        )
    return int(any(c.device == DEVICES[0].name and not c.meets for c in counts))


if __name__ == "__main__":
    sys.exit(main())
