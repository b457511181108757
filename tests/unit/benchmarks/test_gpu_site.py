"""What is carried to a GPU machine without network: unpacked where it fits, never in place of what the machine has."""

from __future__ import annotations

import platform
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu_site import fits, unpack

MEGATRON = "megatron_core-0.16.1-cp312-cp312-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"


@pytest.mark.parametrize(
    ("wheel", "python", "machine", "expected"),
    [
        (MEGATRON, (3, 12), "x86_64", True),
        (MEGATRON, (3, 11), "x86_64", False),
        (MEGATRON, (3, 12), "aarch64", False),
        ("torchao-0.18.0-cp310-abi3-manylinux_2_28_x86_64.whl", (3, 13), "x86_64", True),
        ("torchao-0.18.0-cp310-abi3-manylinux_2_28_x86_64.whl", (3, 9), "x86_64", False),
        ("einops-0.8.2-py3-none-any.whl", (3, 13), "aarch64", True),
        ("six-1.17.0-py2.py3-none-any.whl", (3, 10), "x86_64", True),
    ],
)
def test_which_wheels_fit(wheel, python, machine, expected):
    assert fits(Path(wheel), python, machine) is expected


def test_what_is_there_stays_and_what_does_not_fit_is_said(tmp_path: Path):
    here = f"cp{sys.version_info.major}{sys.version_info.minor}"
    names = [
        f"carried-1.0-{here}-{here}-manylinux_2_28_{platform.machine()}.whl",
        "carried_too-1.0-cp27-cp27m-manylinux_2_28_riscv64.whl",
        "numpy-0.1-py3-none-any.whl",  # of another version than the one that is installed
    ]
    for name in names:
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr(f"{name.split('-')[0]}/__init__.py", "")
    site = tmp_path / "site"
    (line,) = unpack(site, [tmp_path / name for name in names])
    assert line.startswith(f"left out: {names[1]} is not for Python") and "GPU_TARGET" in line
    assert [path.name for path in site.iterdir()] == ["carried"]
