"""What fuzzing found, as plain cases: files that are none, which a command must not read without end or wait for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.fuzz_targets import fresh
from tests.support.run_in_process import done_or_refused

TRAIN = "train --config config.yaml --run_dir=new --dry-run"
NAMED = (
    "export run new --config {}",
    "calibrate run --batches 1 --out new --data {}",
    f"{TRAIN} --data {{}}",
    f"{TRAIN} --model.fp8_format=tensorwise --model.fp8_size_filter={{}}",
    "train --config {}",
    "bench --only quantise --shape 16x16x1 --repetitions 4 --compare {}",
    "estimate --config {}",
    "doctor --config {}",
    "estimate --config config.yaml --device {}",
    "report run --html {}",
    f"{TRAIN} --data.tokenizer={{}}",
    "import hf new --tokenizer {}",
)
IN_PLACE = {
    "run/config.yaml": "diagnose run --against other",
    "run/report.json": "report run",
    "run/metrics.jsonl": "report run",
    "calibration/calibration.json": "export run new --format fp8-tensor --calibration calibration",
    "calibration/calibration.safetensors": "export run new --format fp8-tensor --calibration calibration",
    "hf/tokenizer_config.json": f"{TRAIN} --data.tokenizer=hf/tokenizer.json",
    "hf/config.json": "import hf new",
    "run/checkpoints/latest": "inspect run",
}


def put(kind: str, path: Path) -> None:
    """A pipe that nobody writes to, or a device without an end."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


# A reader that does not ask what a file is waits at a pipe, and never ends at a device.
@pytest.mark.parametrize("command, kind", [*((command, "pipe") for command in NAMED), (NAMED[0], "device")])
def test_a_name_of_no_file(originals, place, command, kind):
    fresh(place, originals, "run", "hf", "config.yaml", "corpus.txt", "cache")
    put(kind, place / "there")
    assert done_or_refused(*command.format("there").split()).code == 2


@pytest.mark.parametrize("name", IN_PLACE)
def test_no_file_where_one_should_be(originals, place, name):
    fresh(place, originals)
    (place / "other").symlink_to(originals / "run")
    put("device", place / name)
    assert done_or_refused(*IN_PLACE[name].split()).code == 2


def test_lists_without_an_end_in_sight(originals, place):
    """Python's own limit of recursion ends their reading."""
    fresh(
        place,
        originals,
        "run",
        "config.yaml",
        "corpus.txt",
        "cache",
        "table.json",
        "bench.json",
        "calibration",
    )
    deep = "[" * 10**5
    (place / "table.json").write_text(deep)
    (place / "bench.json").write_text(deep)
    (place / "calibration" / "calibration.json").write_text(deep)
    commands = [
        NAMED[3].format("table.json"),
        NAMED[5].format("bench.json"),
        IN_PLACE["calibration/calibration.json"],
    ]
    for command in commands:
        assert done_or_refused(*command.split()).code == 2
    assert done_or_refused("estimate", "--config=config.yaml", "--set", f"model.hidden_size={deep}").code == 2


def test_sections_that_are_none_in_another_run(originals, place):
    fresh(place, originals, "run")
    (place / "run" / "config.yaml").write_text(json.dumps({"train": [1], "data": None}))
    (place / "other").symlink_to(originals / "run")
    assert done_or_refused("diagnose", "run", "--against", "other").code == 2


@pytest.mark.parametrize(
    "command", [*NAMED, "report {}", "inspect {}", "generate {} --prompt the", "import {} new"]
)
def test_a_name_longer_than_a_file_may_have(originals, place, command):
    fresh(place, originals, "run", "hf", "config.yaml", "corpus.txt", "cache")
    assert done_or_refused(*command.format("long" * 100).split()).code == 2


@pytest.mark.parametrize("text", ["train: [1]", "data: [1]", "data: text", "train: 3"])
def test_a_section_that_is_none_of_what_is_exported(originals, place, text):
    fresh(place, originals, "run", "config.yaml")
    kept = (place / "config.yaml").read_text().split("\n")
    name = text.partition(":")[0]
    start = next(number for number, line in enumerate(kept) if line.startswith(f"{name}:"))
    end = next((n for n in range(start + 1, len(kept)) if kept[n][:1].strip()), len(kept))
    (place / "config.yaml").write_text("\n".join([*kept[:start], text, *kept[end:]]))
    found = done_or_refused("export", "run", "new", "--config", "config.yaml")
    assert found.code == 2 and f"the section {name!r} of the run's config is" in found.err


@pytest.mark.parametrize("value", ["true", "false", "[]", "3"])
def test_overrides_that_are_none(originals, place, value):
    fresh(place, originals, "config.yaml")
    words = f"estimate --config config.yaml --model.fp8_overrides={value}"
    found = done_or_refused(*words.split())
    assert found.code == 2 and "model.fp8_overrides=" in found.err
