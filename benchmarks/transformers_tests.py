"""Does a converted model pass the tests that the unconverted one passes? transformers' own model tests, three times.

    python -m benchmarks.transformers_tests                      # nine models: plain, mxfp8, tensorwise; some minutes
    python -m benchmarks.transformers_tests --models Llama GPT2

The tests come with transformers' source distribution of the installed version, which pip downloads into build/; nothing
of it is kept in the repository. mxfp8 may lose no test that the plain model passes. tensorwise may lose those that
compare a sequence alone with the same one in a batch: its one scale per tensor depends on the company. Exit code 1:
another one was lost. 2: the tests could not be fetched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("Llama", "Qwen3", "Mixtral", "GPTNeoX", "GPT2", "Bert", "T5", "Bart", "ViT")
COMPANY = ("test_batching_equivalence",)
"""Tests that compare a sequence in batches of different company."""

STAND_INS = {
    "exporters/test_export.py": "ExportTesterMixin",
    "generation/test_utils.py": "GenerationTesterMixin",
}
"""Modules that the tests import and the source distribution lacks: empty classes."""


def fetch(build: Path) -> Path:
    """A folder to put on the path: the package ``their_tests``, and what it needs beside transformers. Made once."""
    name = f"transformers-{version('transformers')}"
    site = build / f"{name}-tests"
    if (site / "complete").exists():
        return site
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = ["--no-binary", ":all:", "--no-build-isolation", "-d", str(build), name.replace("-", "==")]
    subprocess.run([*pip, "download", "--no-deps", *source], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), "parameterized"], check=True)
    with tarfile.open(build / f"{name}.tar.gz") as archive:
        members = [m for m in archive if m.name.startswith(f"{name}/tests/") and m.name.count("/") == 2]
        archive.extractall(site, members, filter="data")
    (site / name / "tests").rename(site / "their_tests")
    for path, kind in STAND_INS.items():
        file = site / "their_tests" / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"class {kind}:\n    pass\n", encoding="utf-8")
        (file.parent / "__init__.py").touch()
    (site / "their_tests" / "__init__.py").touch()
    (site / "complete").touch()
    return site


def run(site: Path, models: list[str], recipe: str) -> dict[str, str]:
    """Test -> 'passed', 'failed: why' or 'skipped'."""
    record = site / f"{recipe or 'plain'}.xml"
    record.unlink(missing_ok=True)
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    names = " or ".join(f"{model}Test" for model in models)
    options = ["-q", "--timeout=600", "-p", "no:cacheprovider", "-k", names, f"--junitxml={record}"]
    # In a folder without settings: the options of this project's own tests are not meant for these.
    options += [f"--rootdir={site}", "-c", os.devnull, "--import-mode=importlib"]
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "pytest",
            *options,
            str(ROOT / "benchmarks/transformers_models.py"),
        ],
        env={**os.environ, **offline, "PYTHONPATH": path, "FP8_RECIPE": recipe},
        cwd=site,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if not record.exists():
        raise RuntimeError(f"the tests did not run:\n{done.stdout[-3000:]}")
    return {_name(case): _verdict(case) for case in ElementTree.parse(record).iter("testcase")}


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"


def _verdict(case: ElementTree.Element) -> str:
    for child in case:
        if child.tag in ("failure", "error"):
            return f"failed: {(child.get('message') or '').splitlines()[0][:150]}"
        if child.tag == "skipped":
            return "skipped"
    return "passed"


def main() -> int:
    """Run, compare, say what was lost; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--recipes", nargs="+", default=["mxfp8", "tensorwise"])
    arguments = parser.parse_args()
    try:
        site = fetch(ROOT / "build")
    except (OSError, subprocess.CalledProcessError, tarfile.TarError) as error:
        print(f"transformers' tests DID NOT RUN: its source distribution could not be fetched ({error})")
        return 2
    plain = run(site, arguments.models, "")
    passed = {name for name, verdict in plain.items() if verdict == "passed"}
    print(f"plain: {len(passed)} of {len(plain)} tests passed", flush=True)
    code = 0
    for recipe in arguments.recipes:
        found = run(site, arguments.models, recipe)
        lost = sorted(name for name in passed if found.get(name) != "passed")
        allowed = [name for name in lost if recipe == "tensorwise" and name.partition(".")[2] in COMPANY]
        print(f"{recipe}: {len(passed) - len(lost)} of {len(passed)} passed, {len(lost)} lost", flush=True)
        for name in lost:
            print(f"  {name}: {found.get(name)}{' (expected: other company)' if name in allowed else ''}")
        code = code or int(len(lost) > len(allowed))
    return code


if __name__ == "__main__":
    sys.exit(main())
