"""Does a converted model pass the tests that the unconverted one passes? transformers' own model tests, plain and in FP8.

    python -m benchmarks.transformers_tests                      # nine models: plain, mxfp8, tensorwise; some minutes
    python -m benchmarks.transformers_tests --models Llama T5 --recipes blockwise --seed 1

The tests come with transformers' source distribution of the installed version, which pip downloads into build/; nothing
of it is kept in the repository. One of this project's own is added to each model: in float32, results and gradients are
those of the specification (specified_linear.py), for every linear.

A test that is lost runs again with linears computed by the specification in place of this package, on the same weights
and inputs. If it is lost there, too, and REASONS says why, FP8 itself loses it. Exit code 1: another one was lost. 2: the
tests could not be fetched.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.common import environment, table, write_results

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("Llama", "Qwen3", "Mixtral", "GPTNeoX", "GPT2", "Bert", "T5", "Bart", "ViT")
OF_TENSOR, OF_ALL = ("tensorwise", "delayed"), ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
REASONS = {
    r"test_batching_equivalence": (OF_TENSOR, "one scale per tensor: the rest of the batch decides"),
    r"test_feed_forward_chunking": (OF_TENSOR, "one scale per tensor: a chunk has another"),
    r"test_eager_matches_sdpa_inference_\d+_fp32_pad_(left|right)(_sdpa_kernels)?": (
        OF_TENSOR,
        "one scale per tensor: padded tokens, which the test does not compare, decide it",
    ),
    r"test_eager_matches_sdpa_inference_\d+_(fp|bf)16_.*": (
        OF_ALL,
        "rounding to FP8 makes the last bit in which two attentions differ a step of FP8",
    ),
}
"""Test -> recipes that may lose it, and why (figures: docs/decisions/layouts.md). The specification must lose it, too."""

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


def run(
    site: Path, models: list[str], recipe: str, seed: int, by: str = "package", only: Sequence[str] = ()
) -> dict[str, str]:
    """Test -> 'passed', 'failed: why' or 'skipped'; of all tests of the models, or of ``only``."""
    record = site / f"{recipe or 'plain'}-{by}.xml"
    record.unlink(missing_ok=True)
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    names = " or ".join(f"{model}Test" for model in models)
    options = ["-q", "--timeout=600", "-p", "no:cacheprovider", "-k", names, f"--junitxml={record}"]
    # In a folder without settings: the options of this project's own tests are not meant for these.
    options += [f"--rootdir={site}", "-c", os.devnull, "--import-mode=importlib"]
    file = str(ROOT / "benchmarks/transformers_models.py")
    tests = [f"{file}::{name.replace('.', '::')}" for name in only] or [file]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", *options, *tests],
        env={
            **os.environ,
            **offline,
            "PYTHONPATH": path,
            "FP8_RECIPE": recipe,
            "FP8_BY": by,
            "FP8_SEED": str(seed),
        },
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


@dataclass(frozen=True)
class Loss:
    """A test that plain linears pass and a recipe's do not."""

    test: str
    verdict: str
    by_specification: str
    reason: str | None  # None: FP8 itself is not known to lose it, so this package does


def losses(plain: dict[str, str], found: dict[str, str]) -> list[str]:
    """The tests that passed and do not any more."""
    return sorted(
        name for name, verdict in plain.items() if verdict == "passed" and found.get(name) != "passed"
    )


def explain(test: str, verdict: str, by_specification: str, recipe: str) -> Loss:
    """With the reason that REASONS has, if the specification loses the test, too."""
    reason = None
    if by_specification.startswith("failed"):
        for pattern, (recipes, why) in REASONS.items():
            if recipe in recipes and re.fullmatch(pattern, test.partition(".")[2]):
                reason = why
    return Loss(test, verdict, by_specification, reason)


def rows_of(plain: dict[str, str], models: list[str], recipe: str, lost: list[Loss]) -> list[list[str]]:
    """Of each model: how many tests passed before, how many are lost, and why."""
    rows = []
    for model in models:
        passed = sum(
            verdict == "passed" and name.startswith(f"{model}Test.") for name, verdict in plain.items()
        )
        own = [loss for loss in lost if loss.test.startswith(f"{model}Test.")]
        why = Counter(loss.reason or "NOT EXPECTED" for loss in own)
        rows.append(
            [model, recipe, str(passed), str(len(own)), "; ".join(f"{n} {w}" for w, n in why.items())]
        )
    return rows


def main() -> int:
    """Run, compare, say what was lost; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--recipes", nargs="+", choices=OF_ALL, default=["mxfp8", "tensorwise"])
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/transformers_tests.*")
    arguments = parser.parse_args()
    models, seed, start = arguments.models, arguments.seed, time.monotonic()
    try:
        site = fetch(ROOT / "build")
    except (OSError, subprocess.CalledProcessError, tarfile.TarError) as error:
        print(f"transformers' tests DID NOT RUN: its source distribution could not be fetched ({error})")
        return 2
    plain = run(site, models, "", seed)
    for name, verdict in plain.items():
        if verdict.startswith("failed"):  # says nothing about FP8 then
            print(f"not compared, since it fails without FP8, too: {name}: {verdict}", flush=True)
    rows: list[list[str]] = []
    lost: dict[str, list[Loss]] = {}
    for recipe in arguments.recipes:
        found = run(site, models, recipe, seed)
        names = losses(plain, found)
        again = run(site, models, recipe, seed, "specification", names) if names else {}
        lost[recipe] = [
            explain(name, found.get(name, "not run"), again.get(name, "not run"), recipe) for name in names
        ]
        rows += rows_of(plain, models, recipe, lost[recipe])
        for loss in lost[recipe]:
            print(f"{recipe} {loss.test}: {loss.verdict}\n  {loss.reason or 'NOT EXPECTED'}", flush=True)
            print(f"  by the specification {loss.by_specification}", flush=True)
    body = table(["model", "recipe", "passed without FP8", "lost in FP8", "why"], rows)
    print(body)
    if arguments.write:
        record = {**environment(["transformers"]), "measured": f"{time.monotonic() - start:.0f} s in all"}
        command = " ".join(["python -m benchmarks.transformers_tests", *sys.argv[1:]])
        data = {recipe: [asdict(loss) for loss in found] for recipe, found in lost.items()}
        write_results(
            "transformers_tests", "transformers' own model tests in FP8", command, record, body, data
        )
    return int(any(loss.reason is None for found in lost.values() for loss in found))


if __name__ == "__main__":
    sys.exit(main())
