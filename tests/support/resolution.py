"""What packages ask of each other, recorded, so that the Makefile's installation can be resolved without a network.

    python -m tests.support.resolution      # with network: record anew what the builds of torch for CUDA bring along

``resolution.json``: package -> version -> its requirements, of everything that an installation takes with each build.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("resolution.json")
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
BUILDS = {"2.8.0": False, "2.11.0": True, "2.13.0": True, "2.15.0": True}
"""Releases of torch that the README names, and whether the tests' packages fit them (compressed-tensors: 2.10 on)."""
Versions = dict[str, dict[str, list[str]]]


def requirements(*, tests: bool) -> list[str]:
    """What setup.py asks for: the package's own needs, and those of its tests and its documentation."""
    found: dict[str, Any] = {}
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("RUNTIME", "EXTRAS"):
                found[name] = ast.literal_eval(node.value)
    return [*found["RUNTIME"], *(found["EXTRAS"]["test"] + found["EXTRAS"]["docs"] if tests else ())]


def resolve(wanted: list[str], constraints: Path, wheels: Path | None = None) -> dict[str, dict[str, Any]]:
    """Package -> metadata of what pip would install into an empty environment, from the index or from write_wheels'.

    RuntimeError with pip's words if nothing fits.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--disable-pip-version-check", "--report", str(report), "-c", str(constraints)]
        environment = dict(os.environ)
        if wheels is not None:  # and nothing else, whatever this machine's pip is set to
            command += ["--index-url", wheels.as_uri()]
            environment = {name: value for name, value in environment.items() if not name.startswith("PIP_")}
            environment |= {"PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": str(wheels)}
        done = subprocess.run(
            [*command, *wanted], capture_output=True, text=True, env=environment, timeout=200
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        installed = json.loads(report.read_text())["install"]
    return {canonicalize_name(each["metadata"]["name"]): each["metadata"] for each in installed}


def write_wheels(recorded: Versions, folder: Path) -> None:
    """A wheel without content for every recorded version, in an index: pip reads a plain folder anew for each package."""
    for name, versions in recorded.items():
        own = folder / name
        own.mkdir()
        for version, needs in versions.items():
            stem = f"{name.replace('-', '_')}-{version}"
            extras = sorted({e for need in needs for e in _extras_of_marker(need)})
            lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
            lines += [f"Provides-Extra: {extra}" for extra in extras]
            lines += [f"Requires-Dist: {need}" for need in needs]
            with zipfile.ZipFile(own / f"{stem}-py3-none-any.whl", "w") as wheel:
                info = f"{stem}.dist-info"
                wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
                wheel.writestr(
                    f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
                )
                wheel.writestr(f"{info}/RECORD", "")
        links = "".join(f'<a href="{wheel.name}">{wheel.name}</a>\n' for wheel in sorted(own.glob("*.whl")))
        (own / "index.html").write_text(f"<!DOCTYPE html>\n{links}")
    # A distribution's own rules, which are none. pip imports it for every tag of every wheel; for one that is not there
    # Python looks through all folders each time.
    (folder / "_manylinux.py").touch()


def _extras_of_marker(need: str) -> set[str]:
    words = str(Requirement(need).marker or "").split('extra == "')[1:]
    return {word.partition('"')[0] for word in words}


def record() -> None:
    """Ask the index what an installation with each build of torch takes, and what each package of it requires."""
    packages: dict[str, dict[str, Any]] = {}
    for build, tests in BUILDS.items():
        # === does not match a local version: it is the build of the public index that is asked for.
        found = resolve([f"torch==={build}", *requirements(tests=tests)], CONSTRAINTS)
        for name, metadata in found.items():
            packages.setdefault(name, {})[metadata["version"]] = metadata.get("requires_dist", [])
    asked = [Requirement(r) for r in requirements(tests=True)]
    asked += [Requirement(r) for versions in packages.values() for needs in versions.values() for r in needs]
    extras = {extra for requirement in asked for extra in requirement.extras}
    kept = {
        name: {
            version: [need for need in needs if _extras_of_marker(need) <= extras]
            for version, needs in sorted(versions.items())
        }
        for name, versions in sorted(packages.items())
    }
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{RECORD}: {sum(map(len, kept.values()))} versions of {len(kept)} packages")


if __name__ == "__main__":
    record()
