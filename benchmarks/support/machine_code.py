"""What a compiled kernel makes a multiprocessor issue: its machine code, disassembled and counted along the hot path.

``nvdisasm`` comes with Triton: this takes no GPU and no CUDA. The code is cut into basic blocks. Of the two ways that a
branch can go the hot path takes the shorter one, all the way to the end: what a branch can skip here is rare (NaN or Inf
in a tile, a division whose operands are subnormal, the one program that stores a scale). That nothing was skipped that
moves data is seen by the bytes: loads and stores on the path are counted too, and whoever counts compares them with what
the kernel has to move. A loop is taken once, and then as often again as it has to be for the bytes that it reads.

Rejected: to count instructions as they are executed, in a simulator. None knows this machine code.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)(.*?);")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclass(frozen=True)
class Instruction:
    """One of a disassembly: its operation with modifiers (``LDG.E.128``), and where a branch goes."""

    operation: str
    predicated: bool
    target: str | None

    @property
    def opcode(self) -> str:
        """Without modifiers."""
        return self.operation.partition(".")[0]

    @property
    def width(self) -> int:
        """Bytes that a thread loads or stores, if it does."""
        return next((_WIDTHS[m] for m in self.operation.split(".") if m in _WIDTHS), 4)


@dataclass
class Block:
    """Instructions without a branch in between, and the numbers of the blocks that can follow."""

    instructions: list[Instruction] = field(default_factory=list)
    following: list[int] = field(default_factory=list)
    target: str | None = None
    falls_through: bool = True


@dataclass(frozen=True)
class HotPath:
    """What one warp issues on the hot path, by operation with modifiers."""

    operations: Mapping[str, float]

    @property
    def issued(self) -> float:
        """Instructions."""
        return sum(self.operations.values())

    def bytes_of(self, *opcodes: str) -> float:
        """Bytes that one thread moves by these."""
        return sum(
            count * Instruction(operation, False, None).width
            for operation, count in self.operations.items()
            if operation.partition(".")[0] in opcodes
        )

    def count(self, *opcodes: str) -> float:
        """Instructions of these opcodes, whatever their modifiers."""
        return sum(n for operation, n in self.operations.items() if operation.partition(".")[0] in opcodes)


def disassembled(cubin: bytes) -> str:
    """nvdisasm's text of a kernel.

    Raises:
        FileNotFoundError: this Triton does not bring nvdisasm.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def blocks_of(text: str) -> list[Block]:
    """Basic blocks in the order of the text, the first the entry. Called routines stand behind, and are not reached."""
    blocks, labels = [Block()], {}
    for line in text.splitlines():
        if found := _LABEL.match(line):
            if blocks[-1].instructions:
                blocks.append(Block())
            labels[found[1]] = len(blocks) - 1
        elif found := _INSTRUCTION.match(line):
            predicate, operation, rest = found.groups()
            target = _TARGET.search(rest)
            branches = operation.partition(".")[0] in ("BRA", "EXIT", "RET")
            # A branch can have a predicate of its own among its operands, beside the one in front.
            conditional = predicate is not None or (branches and re.search(r"\bU?P\d", rest) is not None)
            instruction = Instruction(operation, predicate is not None, target[1] if target else None)
            blocks[-1].instructions.append(instruction)
            if branches:
                blocks[-1].target = instruction.target
                blocks[-1].falls_through = conditional
                blocks.append(Block())
    for number, block in enumerate(blocks):
        if block.target is not None:
            block.following.append(labels[block.target])
        if block.falls_through and number + 1 < len(blocks):
            block.following.append(number + 1)
    return blocks


def hot_path(blocks: list[Block], loop_bytes: int = 0, loads: int = 0) -> HotPath:
    """The shortest way from the entry to the end on which a thread loads at least ``loads`` bytes; with ``loop_bytes`` (a
    thread's loads) through a loop that reads them.

    Raises:
        ValueError: no way loads as much, or bytes for a loop and no loop that loads.
    """
    back = _back_edges(blocks)
    if not loop_bytes:
        way = _shortest(blocks, 0, None, back, loads)
        if way is None:
            raise ValueError(f"no way through the kernel loads {loads} bytes a thread")
        return HotPath(_counted(blocks, way))
    loops = []
    for latch, header in back:
        body = _shortest(blocks, header, latch, back)
        if body is not None and (loaded := HotPath(_counted(blocks, body)).bytes_of("LDG")):
            loops.append((loaded, latch, header, body))
    if not loops:
        raise ValueError(
            f"no loop loads anything, but {loop_bytes} bytes a thread are said to be loaded by one"
        )
    loaded, latch, header, body = max(loops)
    total: Counter[str] = Counter()
    for operation, count in _counted(blocks, body).items():
        total[operation] += count * max(round(loop_bytes / loaded), 1)
    before = _shortest(blocks, 0, header, back) or []
    after = _shortest(blocks, latch, None, back) or []
    return HotPath(total + _counted(blocks, before[:-1]) + _counted(blocks, after[1:]))


def _counted(blocks: list[Block], way: list[int] | None) -> Counter[str]:
    return Counter(
        i.operation for number in way or [] for i in blocks[number].instructions if i.opcode != "NOP"
    )


def _back_edges(blocks: list[Block]) -> set[tuple[int, int]]:
    """(latch, header) of each loop: edges to a block that is still being visited."""
    found: set[tuple[int, int]] = set()
    state = dict.fromkeys(range(len(blocks)), 0)
    stack = [(0, iter(blocks[0].following))]
    state[0] = 1
    while stack:
        number, following = stack[-1]
        for succeeding in following:
            if state[succeeding] == 1:
                found.add((number, succeeding))
            elif not state[succeeding]:
                state[succeeding] = 1
                stack.append((succeeding, iter(blocks[succeeding].following)))
                break
        else:
            state[number] = 2
            stack.pop()
    return found


def _shortest(
    blocks: list[Block], start: int, end: int | None, back: set[tuple[int, int]], loads: int = 0
) -> list[int] | None:
    """Numbers of the blocks from start to end (None: to where the kernel exits) with the fewest instructions, among the
    ways that load at least ``loads`` bytes; None if there is none."""
    best: dict[int, dict[int, tuple[int, list[int]]]] = {}

    def to_end(number: int) -> dict[int, tuple[int, list[int]]]:
        """By bytes loaded, no more than asked for: (instructions, blocks)."""
        if number not in best:
            block = blocks[number]
            own = sum(i.opcode != "NOP" for i in block.instructions)
            loaded = sum(i.width for i in block.instructions if i.opcode == "LDG")
            if number == end or (end is None and _exits(block)):
                best[number] = {min(loaded, loads): (own, [number])}
                return best[number]
            ways: dict[int, tuple[int, list[int]]] = {}
            for following in block.following:
                if (number, following) not in back:
                    for behind, (cost, way) in to_end(following).items():
                        total = min(loaded + behind, loads)
                        ways[total] = min(
                            ways.get(total, (own + cost, [number, *way])), (own + cost, [number, *way])
                        )
            best[number] = ways
        return best[number]

    found = to_end(start).get(loads)
    return None if found is None else found[1]


def _exits(block: Block) -> bool:
    return any(i.opcode == "EXIT" and not i.predicated for i in block.instructions)
