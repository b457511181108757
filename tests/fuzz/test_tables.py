"""Tables and calibrations that another tool or person changed: used or refused in one line."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.draws import draws
from tests.support.file_edits import byte_edits, edited, json_edited, json_edits
from tests.support.fuzz_targets import FIXTURES, fresh
from tests.support.run_in_process import done_or_refused

SIZE_FILTER = (
    "train --config config.yaml --run_dir=again --dry-run --model.fp8_format=tensorwise"
    " --model.fp8_size_filter=table.json"
)
STATIC = "generate run --prompt the --max-new-tokens 1 --recipe tensorwise --activations static --calibration calibration"
EXPORT = "export run out --format fp8-tensor --calibration calibration"
BENCH = "bench --only quantise --recipe tensorwise --shape 16x16x1 --repetitions 4 --compare bench.json"
FILES = {
    "table.json": (SIZE_FILTER,),
    "bench.json": (BENCH,),
    "calibration/calibration.json": (STATIC, EXPORT),
}


@draws(5, often=2, suppress_health_check=[FIXTURES])
@given(st.sampled_from(sorted(FILES)), json_edits(), st.data())
def test_other_values(originals, place, name, edits, data):
    path = fresh(place, originals, "run", "config.yaml", "corpus.txt", "cache", *{name.split("/")[0]}) / name
    path.write_text(json.dumps(json_edited(json.loads(path.read_text()), edits)))
    done_or_refused(*data.draw(st.sampled_from(FILES[name])).split())


@draws(3, often=2, suppress_health_check=[FIXTURES])
@given(st.sampled_from(sorted(FILES)), byte_edits(), st.data())
def test_other_bytes(originals, place, name, edits, data):
    path = fresh(place, originals, "run", "config.yaml", "corpus.txt", "cache", *{name.split("/")[0]}) / name
    path.write_bytes(edited(path.read_bytes(), edits))
    done_or_refused(*data.draw(st.sampled_from(FILES[name])).split())


@draws(3, often=2, suppress_health_check=[FIXTURES])
@given(byte_edits(), st.sampled_from((STATIC, EXPORT)))
def test_other_ranges_under_a_record_that_agrees(originals, place, edits, command):
    folder = fresh(place, originals, "run", "corpus.txt", "cache", "calibration") / "calibration"
    path, record = folder / "calibration.safetensors", folder / "calibration.json"
    path.write_bytes(edited(path.read_bytes(), edits))
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}))
    done_or_refused(*command.split())


@pytest.mark.parametrize("command", (SIZE_FILTER, STATIC, EXPORT, BENCH))
def test_whole_ones_are_taken(originals, place, command):
    """Else these tests would show nothing."""
    fresh(place, originals)
    assert done_or_refused(*command.split()).code == 0
