"""Device generations: the support matrix's columns, and this machine's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.cpu import emulation


@dataclass(frozen=True)
class Generation:
    """One column of the matrix.

    Attributes:
        key: its name in JSON: sm90, mi300x, cpu-amx.
        column: its name in the table, at most four characters.
        name: in words.
        capability: an NVIDIA GPU's compute capability.
        architecture: an AMD GPU's architecture.
        amx, avx512_bf16: instruction sets of a CPU.
    """

    key: str
    column: str
    name: str
    capability: tuple[int, int] | None = None
    architecture: str | None = None
    amx: bool = False
    avx512_bf16: bool = False

    @property
    def is_cpu(self) -> bool:
        """Whether it is a CPU."""
        return self.capability is None and self.architecture is None


GENERATIONS = (
    Generation("sm80", "8.0", "A100", (8, 0)),
    Generation("sm86", "8.6", "RTX 30, A10", (8, 6)),
    Generation("sm89", "8.9", "RTX 40, L4, L40S", (8, 9)),
    Generation("sm90", "9.0", "H100, H200", (9, 0)),
    Generation("sm100", "10.0", "B200, GB200", (10, 0)),
    Generation("sm103", "10.3", "B300, GB300", (10, 3)),
    Generation("sm120", "12.0", "RTX 50, RTX PRO Blackwell", (12, 0)),
    Generation("sm121", "12.1", "GB10", (12, 1)),
    Generation("mi300x", "300X", "MI300X", architecture="gfx942"),
    Generation("mi355x", "355X", "MI355X", architecture="gfx950"),
    Generation("cpu", "CPU", "CPU without AVX512-BF16 and AMX"),
    Generation("cpu-avx512-bf16", "bf16", "CPU with AVX512-BF16", avx512_bf16=True),
    Generation("cpu-amx", "amx", "CPU with AMX", amx=True, avx512_bf16=True),
)
"""Columns of the matrix, in their order."""


def here() -> Generation | None:
    """The column of the device that this process computes on; None for a GPU without a column."""
    if not torch.cuda.is_available():
        amx, short = torch.cpu._is_amx_tile_supported(), emulation.AVX512 in emulation.inner_loops()
        return next(
            g for g in reversed(GENERATIONS) if g.is_cpu and g.amx <= amx and g.avx512_bf16 <= (short or amx)
        )
    if vars(torch.version).get("hip"):
        name = torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName.partition(":")[0]
        return next((g for g in GENERATIONS if g.architecture == name), None)
    capability = torch.cuda.get_device_capability()
    return next((g for g in GENERATIONS if g.capability == capability), None)
