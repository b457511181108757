"""Lines of JSON: whole ones are read, broken ones are named with their number."""

import math
import os

import pytest

from megatron_fp8.files.records import read_lines


def written(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    return path


def test_an_unfinished_last_line_is_left_out(tmp_path):
    path = written(tmp_path, '{"iteration": 1}\n{"iteration": 2}\n{"itera')
    assert [line.iteration() for line in read_lines(path)] == [1, 2]
    assert list(read_lines(tmp_path / "nothing.jsonl")) == []


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[1]", "is no JSON object"),
        ('{"x": 1}', "iteration None"),
        ('{"iteration": -1}', "iteration -1"),
        ('{"iteration": 9007199254740992}', "9007199254740992"),
        ('{"iteration": 1, "x": true}', "x True"),
        ('{"iteration": 1, "x": [%s0]}' % ("0," * 100), "x \\[0, 0"),
    ],
)
def test_a_broken_line_is_named_with_its_number(tmp_path, line, said):
    path = written(tmp_path, f'{{"iteration": 0, "x": 0}}\n{line}\n')
    with pytest.raises(ValueError, match=f"^line 2 of '{path}'.*{said}") as error:
        for found in read_lines(path):
            found.iteration()
            found.number_of("x")
    assert len(str(error.value)) < 400


def test_numbers_of_other_people(tmp_path):
    values = '1, -2.5, NaN, Infinity, "-Infinity", "NaN", null'
    path = written(tmp_path, "".join(f'{{"iteration": 1, "x": {v}}}\n' for v in values.split(", ")))
    found = [line.number_of("x") for line in read_lines(path)]
    assert found[:2] == [1, -2.5] and math.isnan(found[2]) and found[3:5] == [math.inf, -math.inf]
    assert math.isnan(found[5]) and found[6:] == [None]
    huge = written(tmp_path, f'{{"iteration": 1, "x": 1{"0" * 400}}}\n')
    with pytest.raises(ValueError, match="401 digits is too large a number"):
        list(read_lines(huge))


def test_what_is_no_ordinary_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="cannot be read"):
            list(read_lines(path))
