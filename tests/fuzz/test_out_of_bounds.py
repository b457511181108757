"""Small files that stand for much: nested, repeated by aliases, with numbers of many digits, in another encoding.

A command takes one or refuses it in one line, as soon as any other file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.draws import draws
from tests.support.file_edits import planted
from tests.support.fuzz_targets import CONFIG, FIXTURES, fresh
from tests.support.run_in_process import done_or_refused

TRAIN = "train --config config.yaml --run_dir=again --dry-run"
REPORT = "report run"
RESUME = "train --config config.yaml --run_dir=run --train.train_iters=2"
IMPORT = "import {} out"
EXPORT = "export run out --format fp8-tensor --calibration calibration"
JSON = {
    "table.json": f"{TRAIN} --model.fp8_format=tensorwise --model.fp8_size_filter=table.json",
    "bench.json": "bench --only quantise --recipe tensorwise --shape 16x16x1 --repetitions 4 --compare bench.json",
    "calibration/calibration.json": EXPORT,
    "hf/config.json": IMPORT.format("hf"),
    "hf/tokenizer.json": f"{TRAIN} --data.tokenizer=hf/tokenizer.json",
    "hf/tokenizer_config.json": f"{TRAIN} --data.tokenizer=hf/tokenizer.json",
    "hf/generation_config.json": IMPORT.format("hf"),
    "hf_fp8/config.json": IMPORT.format("hf_fp8"),
    "hf_shards/model.safetensors.index.json": IMPORT.format("hf_shards"),
    "run/report.json": REPORT,
    "run/metrics.jsonl": REPORT,
    "run/telemetry.jsonl": REPORT,
    "run/checkpoints/iter_0000002/manifest.json": RESUME,
    "run/checkpoints/iter_0000002/metadata.json": RESUME,
}
YAML = (
    TRAIN,
    "diagnose run --against other",
    "export run out --config config.yaml",
    "estimate --config config.yaml",
)
IN_JSON = (
    *("[" * levels + "1" + "]" * levels for levels in (40, 70, 300, 900, 5000)),
    '{"a":' * 900 + "1" + "}" * 900,
    "[" * 10**5, "9" * 10**6, "-1" + "0" * 4000, "0." + "9" * 10**6, "1e" + "9" * 10**5, "1E-999999", "-0",
    "NaN", "-Infinity",
    '{"a": 1, "a": 2}', '{"": {}, "": []}', '"\\ud800"', '"\\u0000"', f'"{"x" * 10**6}"',
    '"' + "\\u001b[2J" * 10**4 + '"',
    f'{{"{"k" * 10**6}": 1}}', "[" + "[]," * 10**5 + "[]]", "True", "// x",
)  # fmt: skip
IN_YAML = (
    "\n" + "\n".join(f"  - &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 1}]" for i in range(30)),
    "\n" + "\n".join(f"  - &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 2) if i else '{x: 1}'}]}}" for i in range(40)),
    "\n" + "\n".join(f"  - &a{i} [{f'*a{i - 1}' if i else 1}]" for i in range(300)),
    "&a [*a]", "&a {x: *a}", "*nothing", "[" * 60 + "]" * 60, "{a: " * 40 + "1" + "}" * 40, "[" * 10**4,
    "0x" + "f" * 10**5,
    "1" + ":59" * 10**5, "9" * 10**5, "0b" + "1" * 10**5, "0." + "9" * 10**5,
    "1.0e+" + "9" * 10**4, "{.nan: 1}", "{~: 1}",
    "{1: a, 0x1: b}", "{2026-01-01: bf16}", "2026-01-01", "2026-99-99", "!!int x", "!!float ''", "!!bool x", "!!binary x",
    "!!binary aGk=", "!!set {a, b}", "!!omap [a: 1]", "!!timestamp x", "!!python/name:os.system", '"\\ud800"', '"\\0"',
    '{"\\ud800": bf16}', "{? [a] : b}", "x" * 10**6, "[" + "1," * 10**4 + "1]", "{" + "a: 1," * 3 + "}",
)  # fmt: skip
CODED = ("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1")


def as_yaml(content: object) -> str:
    return yaml.safe_dump(content, sort_keys=False)


def plant(path: Path, number: int, text: str) -> None:
    """In the JSON of a file, or of the last of its lines."""
    *before, last = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    path.write_text("\n".join([*before, planted(json.loads(last), number, text, json.dumps), ""]))


def recode(path: Path, coding: str, end: str) -> None:
    """The same text in another encoding, with other line ends."""
    path.write_bytes((path.read_text() + f"{end}").replace("\n", end).encode(coding))


def everything(place: Path, originals: Path, name: str) -> Path:
    needed = {"run", "config.yaml", "corpus.txt", "cache", "calibration", name.split("/")[0]}
    fresh(place, originals, *sorted(needed))
    return place / name


@draws(8, often=2, suppress_health_check=[FIXTURES])
@given(st.sampled_from(sorted(JSON)), st.integers(0, 60), st.sampled_from(IN_JSON))
@example("run/telemetry.jsonl", 4, "-1" + "0" * 4000)
def test_planted_in_json(originals, place, name, number, text):
    plant(everything(place, originals, name), number, text)
    done_or_refused(*JSON[name].split())


@draws(7, often=2, suppress_health_check=[FIXTURES])
@given(st.integers(0, 40), st.sampled_from(IN_YAML), st.sampled_from(YAML))
def test_planted_in_a_config(originals, place, number, text, command):
    everything(place, originals, "config.yaml").write_text(planted(CONFIG, number, text, as_yaml))
    if "other" in command:
        (place / "other").mkdir()
        (place / "config.yaml").rename(place / "other" / "config.yaml")
    done_or_refused(*command.split())


@draws(5, suppress_health_check=[FIXTURES])
@given(
    st.sampled_from([*sorted(JSON), "config.yaml"]),
    st.sampled_from(CODED),
    st.sampled_from(("\n", "\r\n", "\r")),
)
def test_in_another_encoding(originals, place, name, coding, end):
    recode(everything(place, originals, name), coding, end)
    done_or_refused(*JSON.get(name, TRAIN).split())


@pytest.mark.parametrize("name", JSON)
def test_a_key_that_stands_twice_is_refused(originals, place, name):
    """The first would be dropped without a word. In a tokenizer.json it is Hugging Face's own reader's to say."""
    path = everything(place, originals, name)
    head, brace, rest = path.read_text().partition("{")
    key = json.dumps(
        next(
            iter(
                json.loads(path.read_text().splitlines()[0] if path.suffix == ".jsonl" else path.read_text())
            )
        )
    )
    path.write_text(f"{head}{brace}{key}: 0, {rest}")
    assert done_or_refused(*JSON[name].split()).code == 2 or name == "hf/tokenizer.json"
