"""`megatron-fp8 formats`: tables that fit a terminal, CSV that reads back, a picture, and refusals of one line."""

from __future__ import annotations

import csv

import ml_dtypes
import numpy as np
import pytest

from megatron_fp8.commands.main import main


def formats(*arguments: object) -> int:
    return main(["formats", *map(str, arguments)])


def test_the_terminal_has_a_picture_and_tables_in_80_columns(capsys):
    assert formats() == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80 and said.isascii()
    bars = dict(
        line.split(maxsplit=1) for line in said.splitlines() if line.startswith(("  e", "  b", "  f"))
    )
    assert bars["e4m3"] == "..." + 15 * "=" and bars["e5m2"] == ".." + 30 * "=" and bars["e2m1"] == ".==="
    assert "| largest         |   448 |  57344 |  2^127 |" in said
    assert "| 2^-10 | 2^-9 100.0% |" in said and "| 2^-11 |           0 |" in said and "saturates" in said
    assert said.count("100.0%") == 3, (
        "of e4m3, e5m2 and e2m1: what lies below the smallest value rounds to it or to 0"
    )
    assert "63488" in said and "63,488" not in said, "digits as in 57344"
    assert "mxfp8 1x32" in said and "spiky: history 1024, margin 0" in said


def test_all_values_are_exact_and_fit(capsys):
    assert formats("--table=values") == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "  2^-9      1/512\n" in said and "  2^8         256      288" in said and "     448\n" in said
    assert "  2^-16   1/65536\n" in said and "  2^15      32768    40960    49152    57344\n" in said


def test_the_csv_has_every_code(tmp_path, capsys):
    assert formats(f"--csv={tmp_path / 'codes.csv'}") == 0
    rows = list(csv.DictReader((tmp_path / "codes.csv").open()))
    counts = {name: sum(row["format"] == name for row in rows) for name in {row["format"] for row in rows}}
    assert counts == {"e4m3": 256, "e5m2": 256, "e8m0": 256, "e2m1": 16, "bf16": 65536, "fp16": 65536}
    mine = [row for row in rows if row["format"] == "e4m3"]
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal([float(row["value"]) for row in mine], expected)
    assert mine[0x7E] == {"format": "e4m3", "code": "0x7e", "value": "448.0", "spacing": ""}
    assert mine[0x7F]["value"] == "nan" and mine[0xB8]["value"] == "-1.0" and mine[0xB8]["spacing"] == "0.125"
    assert "131,856 rows" in capsys.readouterr().out


def test_a_dash_is_stdout(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert formats("--csv=-", "--table=formats") == 0
    assert capsys.readouterr().out.startswith("format,bits,") and not list(tmp_path.iterdir())


def test_the_picture_is_a_png(tmp_path):
    path = tmp_path / "formats.png"
    assert formats(f"--png={path}") == 0
    assert path.read_bytes().startswith(b"\x89PNG") and 20_000 < path.stat().st_size < 400_000


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--png=/no/such/folder/a.png"], "there is no such folder"),
        (["--csv="], "argument --csv: '' names no file"),
        (["--csv=same.png", "--png=./same.png"], "--png and --csv name the same file"),
        (["--csv=codes.csv", "--png=-"], "--png=- must be a FILE.png"),
        (["--colour"], "unrecognized"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, words):
    assert formats(*arguments) == 2
    said = capsys.readouterr().err
    assert words in said and said.startswith("error: ") and said.count("\n") == 1
