"""The Makefile's installation fits every build of torch that the README names: one resolve, and torch stays."""

from __future__ import annotations

import json
import re
import sys
from functools import lru_cache
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.support.resolution import BUILDS, CONSTRAINTS, RECORD, ROOT, requirements, resolve, write_wheels


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    write_wheels(json.loads(RECORD.read_text()), folder)
    return folder


@lru_cache
def versions(wheels: Path, build: str, tests: bool, constraints: Path = CONSTRAINTS) -> dict[str, str]:
    if sys.version_info < (3, 11):
        pytest.skip("the recorded index has what Python 3.11 installs")
    wanted = [f"torch=={build}", *requirements(tests=tests)]
    found = resolve(wanted, constraints, wheels)
    return {name: metadata["version"] for name, metadata in found.items()}


@pytest.mark.parametrize(
    "build, tests",
    [
        pytest.param(build, tests, marks=() if build in ("2.8.0", "2.13.0") else pytest.mark.long)
        for build, tests in BUILDS.items()
    ],
)
def test_a_build_of_torch_for_cuda_is_kept_with_the_triton_that_it_brings(wheels, build, tests):
    found = versions(wheels, build, tests)
    (brought,) = (n for n in json.loads(RECORD.read_text())["torch"][build] if n.startswith("triton"))
    assert found["torch"] == build and found["megatron-core"] == "0.16.1"
    assert found["triton"] in brought.replace("~=", "=="), brought


def test_a_constraint_that_contradicts_torch_is_found(wheels, tmp_path):
    """As `triton==3.9.0` did: torch 2.13 for CUDA needs 3.7.1."""
    contradicting = tmp_path / "constraints.txt"
    contradicting.write_text(CONSTRAINTS.read_text() + "triton==3.9.0\n")
    with pytest.raises(RuntimeError, match="triton"):
        versions(wheels, "2.13.0", True, contradicting)


def test_a_pin_is_of_something_that_is_installed(wheels):
    """One that is left behind fails in a new environment only: an old one still holds what nothing asks for."""
    lines = [line.partition("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines()]
    pinned = {canonicalize_name(Requirement(line).name) for line in lines if line}
    asked = {canonicalize_name(Requirement(line).name) for line in requirements(tests=True)}
    assert len(pinned) > 20 and pinned - asked <= set(versions(wheels, "2.13.0", True))


def test_the_makefile_resolves_torch_together_with_all_else():
    """A second `pip install` that does not name torch may replace it."""
    lines = (ROOT / "Makefile").read_text().splitlines()
    installs = [line for line in lines if "$(PIP)" in line and " -e " in line]
    assert len(installs) == 2 and all('"$(TORCH)"' in line for line in installs), installs


def test_what_is_pinned_exists_for_the_oldest_python():
    """Or has a marker: a pin that needs a newer Python makes all of `make test` impossible to install on that one."""
    (oldest,) = re.findall(r'python_requires=">=(.+?)"', (ROOT / "setup.py").read_text())
    lines = [line.partition("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines()]
    pinned = [Requirement(line) for line in lines if "==" in line.partition(";")[0]]
    assert len(pinned) > 20
    for pin in pinned:
        if pin.marker is None or pin.marker.evaluate({"python_version": oldest}):
            needs = metadata(pin.name)["Requires-Python"] or ""
            assert SpecifierSet(needs).contains(f"{oldest}.13"), (
                f"{pin} needs Python {needs}: give it a marker"
            )
