"""The container file, as far as it can be looked at without building it: what it copies, runs and names is there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FILE = ROOT / "examples" / "container" / "Containerfile"


def instructions() -> list[tuple[str, str]]:
    """(its name, the rest) of each, comments left out and continued lines joined."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def of(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def copied() -> list[tuple[list[str], str]]:
    """(paths, where to) of each COPY."""
    return [(words[:-1], words[-1]) for words in map(str.split, of("COPY"))]


def in_makefile(name: str) -> str:
    """A variable's first value."""
    (found,) = re.findall(rf"^{name} *[?:]?= *(.+)$", (ROOT / "Makefile").read_text(), re.M)
    return str(found)


def test_what_is_copied_is_there_and_is_all_that_an_installation_needs(tmp_path):
    """The package is built of it alone, configs and C sources too."""
    for paths, where in copied():
        for path in paths:
            assert (ROOT / path).exists(), path
            if (ROOT / path).is_dir():
                shutil.copytree(ROOT / path, tmp_path / where, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / path, tmp_path / where)
    subprocess.run([sys.executable, "setup.py", "-q", "build"], cwd=tmp_path, check=True, capture_output=True)
    built = tmp_path / "build" / "lib" / "megatron_fp8"
    assert (built / "configs" / "tiny_gpt_cpu.yaml").is_file() and list(
        (built / "kernels" / "cpu").glob("*.c")
    )


def test_it_installs_as_the_makefile_does():
    ran = " && ".join(of("RUN"))
    pip = in_makefile("PIP").replace("$(PY)", "python").replace(" install ", " install --no-cache-dir ")
    assert f'{pip} "${{TORCH}}" .' in ran
    assert f"TORCH={in_makefile('TORCH')}" in of("ARG")
    (apt,) = re.findall(r"apt-get -qq install -y (gcc[\w .-]*)", (ROOT / "Makefile").read_text())
    assert f"DEBIAN_FRONTEND=noninteractive apt-get -qq install -y {apt.strip()}" in ran
