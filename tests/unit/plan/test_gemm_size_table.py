"""The table of measured GEMMs: what it decides, and what is no table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_fp8.plan.gemm_size_table import FORMAT, Gemm, load_table, roles_of
from megatron_fp8.recipe import Float8CurrentScaling, MXFP8BlockScaling

RECIPE = Float8CurrentScaling()
ROW = {"k": 16, "n": 16, "tokens": 16, "ratio": 0.5, "spread": 0.0}
ROWS = {
    (256, 256, 64): 1.5,
    (512, 512, 64): 1.1,
    (512, 512, 128): 0.9,
    (1024, 512, 64): 0.8,
    (2048, 64, 64): 1.3,
}


def content(**changes):
    rows = [{"k": k, "n": n, "tokens": t, "ratio": ratio, "spread": 0.1} for (k, n, t), ratio in ROWS.items()]
    found = {
        "format": FORMAT,
        "device": "a GPU",
        "backend": "native",
        "recipe": "tensorwise",
        "roles": roles_of(RECIPE),
        "date": "2026-11-21",
        "rows": rows,
    }
    return {key: value for key, value in {**found, **changes}.items() if value is not None}


def write(path: Path, value) -> str:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


@pytest.mark.parametrize(
    "shape, pays, nearest, ratio",
    [
        ((512, 512, 64), False, None, 1.1),  # measured: its own row, not a smaller one's
        ((1024, 512, 64), True, None, 0.8),
        ((1024, 512, 127), True, (1024, 512, 64), 0.8),
        # A larger row that pays says nothing of a smaller GEMM.
        ((1023, 512, 64), False, (512, 512, 64), 1.1),
        ((600, 600, 200), True, (512, 512, 128), 0.9),
        ((8192, 500, 64), False, (2048, 64, 64), 1.3),  # 2048 x 64 x 64 is more work than 256 x 256 x 64
        ((256, 255, 64), False, None, None),
        ((128, 4096, 4096), False, None, None),
    ],
)
def test_a_shape_is_decided_by_what_was_measured_at_most_as_large(tmp_path, shape, pays, nearest, ratio):
    verdict = load_table(write(tmp_path / "t.json", content())).verdict(Gemm(*shape))
    assert verdict.pays is pays
    k, n, tokens = shape
    assert verdict.reason.startswith(f"K {k} x N {n} at {tokens} tokens ")
    assert "a GPU, 2026-11-21" in verdict.reason
    if nearest is not None:
        assert f"the nearest below, {Gemm(*nearest)}, takes {ratio:.2f} x BF16's time" in verdict.reason
    elif ratio is not None:
        assert f"takes {ratio:.2f} x BF16's time (spread 10%), measured" in verdict.reason
    else:
        assert "was not measured, nor any as small" in verdict.reason


def test_one_does_not_pay_nor_what_noise_could_be(tmp_path):
    rows = [{**ROW, "k": 16 * i, "ratio": r, "spread": s} for i, (r, s) in enumerate(NOISE, 1)]
    table = load_table(write(tmp_path / "t.json", content(rows=rows)))
    assert [table.verdict(Gemm(16 * i, 16, 16)).pays for i in range(1, 6)] == [
        False,
        True,
        False,
        True,
        False,
    ]


NOISE = [(1.0, 0.0), (0.99, 0.0), (0.89, 1.18), (0.8, 0.49), (0.8, 0.51)]


def test_a_changed_file_is_read_again(tmp_path):
    path = write(tmp_path / "t.json", content())
    assert load_table(path).device == "a GPU" and load_table(path) is load_table(path)
    write(tmp_path / "t.json", content(device="another GPU"))
    assert load_table(path).device == "another GPU"


def test_only_the_same_device_backend_and_recipe(tmp_path):
    table = load_table(write(tmp_path / "t.json", content()))
    table.check("a GPU", "native", RECIPE)
    pow2 = Float8CurrentScaling(use_power_2_scales=True)
    for arguments, words in (
        (("NVIDIA B200", "native", RECIPE), "device 'a GPU', and this is 'NVIDIA B200'"),
        (("a GPU", "emulated", RECIPE), "backend 'native', and this is 'emulated'"),
        (("a GPU", "native", MXFP8BlockScaling()), "recipe 'tensorwise', and this is 'mxfp8'"),
        (("a GPU", "native", pow2), "e4m3 tensor pow2"),
    ):
        with pytest.raises(ValueError) as caught:
            table.check(*arguments)
        assert words in str(caught.value) and "bench --tune --out" in str(caught.value)


def test_a_table_in_which_nothing_pays_is_an_error(tmp_path):
    rows = [{**ROW, "tokens": t, "ratio": r} for t, r in ((1, 1.7), (8, 1.25))]
    table = load_table(write(tmp_path / "t.json", content(rows=rows)))
    with pytest.raises(ValueError, match=r"leaves no GEMM in FP8.* at 8 tokens, takes 1\.25 x BF16.*Drop"):
        table.check("a GPU", "native", RECIPE)


def test_tokens_are_given_or_the_only_ones(tmp_path):
    several = load_table(write(tmp_path / "a.json", content()))
    assert several.tokens(7) == 7
    with pytest.raises(
        ValueError, match=r"measured at 64, 128 tokens, and fp8_size_filter_tokens is None: set"
    ):
        several.tokens(None)
    one = load_table(write(tmp_path / "b.json", content(rows=[{**ROW, "tokens": 64}])))
    assert one.tokens(None) == 64 and one.tokens(7) == 7


MALFORMED = {
    "not JSON": ("{", "it is not JSON"),
    "a list": ([], "its format is '\\[\\]'"),
    "another format": (content(format="gpu_bench"), "its format is 'gpu_bench' and must be"),
    "no format": (content(format=None), "its format is 'None'"),
    "no device": (content(device=None), "device=None must be a text"),
    "no roles": (content(roles=None), "roles=None must say"),
    "no rows": (content(rows=[]), r"rows=\[\] must be"),
    "a row without tokens": (content(rows=[{**ROW, "tokens": None}]), r"rows\[0\].tokens=None must be"),
    "a size of 0": (content(rows=[ROW, {**ROW, "k": 0}]), r"rows\[1\].k=0 must be a positive integer"),
    "a size of True": (content(rows=[{**ROW, "n": True}]), r"rows\[0\].n=True must be"),
    "a ratio of NaN": (content(rows=[{**ROW, "ratio": float("nan")}]), r"rows\[0\].ratio=nan must be"),
    "a ratio of -1": (content(rows=[{**ROW, "ratio": -1}]), r"rows\[0\].ratio=-1 must be a number above 0"),
    "no spread": (content(rows=[{**ROW, "spread": None}]), r"rows\[0\].spread=None must be"),
    "a ratio of 0": (content(rows=[{**ROW, "ratio": 0}]), r"rows\[0\].ratio=0 must be a number above 0"),
    "a ratio in words": (content(rows=[{**ROW, "ratio": "1"}]), r"rows\[0\].ratio='1' must be"),
    "a row that is a list": (content(rows=[[1, 2]]), r"rows\[0\]=\[1, 2\] must have"),
    "a shape twice": (content(rows=[ROW, ROW]), r"rows\[1\] measures K 16 x N 16 at 16 tokens a second"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_table_is_an_error_that_says_where(tmp_path, name):
    value, words = MALFORMED[name]
    path = write(tmp_path / "t.json", value)
    with pytest.raises(ValueError, match=words) as caught:
        load_table(path)
    assert path in str(caught.value) and "bench --tune --out" in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="it cannot be read \\(No such file"):
        load_table(str(tmp_path / "none.json"))
