"""Unpack the wheels that were carried to a GPU machine: `python -m benchmarks.gpu_site FOLDER WHEEL ...`.

It needs neither network nor pip. What the machine's own Python has is left to it, also in another version. A wheel for
another Python or processor is left out, which is said: what needs it is then not run, and everything else is.
"""

from __future__ import annotations

import platform
import sys
import zipfile
from importlib import metadata
from pathlib import Path


def fits(wheel: Path, python: tuple[int, int], machine: str) -> bool:
    """Whether a wheel's name says that it works on Linux with this CPython, (3, 12), and processor, 'x86_64'."""
    *_, pythons, abis, platforms = wheel.stem.split("-")
    here = f"cp{python[0]}{python[1]}"
    stable = any(
        tag.startswith("cp3") and int(tag[3:]) <= python[1]
        for tag in pythons.split(".")
        if "abi3" in abis.split(".")
    )
    right_python = stable or not {here, "py3", f"py{python[0]}{python[1]}"}.isdisjoint(pythons.split("."))
    right_abi = not {here, "abi3", "none"}.isdisjoint(abis.split("."))
    right_machine = any(tag == "any" or tag.endswith(f"_{machine}") for tag in platforms.split("."))
    return right_python and right_abi and right_machine


def unpack(folder: Path, wheels: list[Path]) -> list[str]:
    """Unpack what fits and is not installed; a line for each wheel that does not fit."""
    lines = []
    for wheel in wheels:
        name = wheel.name.split("-")[0]
        if _installed(name):
            continue
        if fits(wheel, sys.version_info[:2], platform.machine()):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        else:
            here = f"Python {sys.version_info.major}.{sys.version_info.minor} on {platform.machine()}"
            lines.append(
                f"left out: {wheel.name} is not for {here} (GPU_TARGET and GPU_ARCH of make gpu-wheels)"
            )
    return lines


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    for line in unpack(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]):
        print(line)
