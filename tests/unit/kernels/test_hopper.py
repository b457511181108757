"""Every kernel compiled for an H100, on any machine: what the instructions show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """What hopper.py prints, by name; compiled afresh, in a process that does not interpret."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
    }
    out = subprocess.run(
        [sys.executable, "-m", "tests.support.hopper"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=280,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    return [json.loads(line) for line in out.stdout.splitlines()]


def named(launches, *prefixes):
    found = [launch for launch in launches if launch["name"].startswith(prefixes)]
    assert found
    return found


QUANTISING = ("delayed", "tensorwise", "rowwise", "blockwise", "mx", "norm", "swiglu")


def test_nothing_flushes_subnormals_or_approximates(launches):
    """IEEE products, divisions and roots. SwiGLU's exponential and sigmoid are approximate, and say so."""
    for launch in launches:
        opcodes = set(launch["opcodes"])
        assert not [o for o in opcodes if ".ftz" in o], launch["name"]
        loose = {o for o in opcodes if ".approx" in o or ".full" in o}
        assert loose <= ({"ex2.approx.f32", "div.full.f32"} if "swiglu" in launch["name"] else set()), launch[
            "name"
        ]
        if not launch["name"].startswith("matmul"):
            assert not [o for o in opcodes if o.startswith("fma.")], f"{launch['name']} contracts"


def test_every_launch_says_whether_sums_are_contracted(launches):
    """Triton's default changes between versions, and some warn where it is not named."""
    assert [launch["name"] for launch in launches if "enable_fp_fusion" not in launch["options"]] == []


def test_histories_are_read_before_they_are_written(launches):
    """By other threads of a program, and for short histories nothing else makes them wait."""
    assert all("bar.sync" in launch["opcodes"] for launch in named(launches, "update"))


def test_codes_are_made_by_the_hardware(launches):
    for launch in launches:
        if launch["kernel"] in ("cast_tensor", "cast_rows", "quantize_tiles"):
            fmt = "e5m2" if launch["name"] in ("delayed-float32", "blockwise-fp32", "swiglu-grad") else "e4m3"
            assert f"cvt.rn.satfinite.{fmt}x2.f32" in launch["opcodes"], launch["name"]


def test_nothing_spills(launches):
    """Registers suffice, and those of two programs fit a multiprocessor where quantising is not fused."""
    for launch in launches:
        assert launch["stack"] <= 32, f"{launch['name']} spills {launch['stack']} bytes a thread"
    for launch in named(launches, "delayed", "tensorwise", "rowwise", "blockwise", "mx"):
        if launch["name"] != "blockwise-weight":
            assert 2 * launch["registers"] * 32 * launch["warps"] <= 65536, launch["name"]


def test_memory_is_accessed_sixteen_bytes_at_a_time(launches):
    """Also where codes are written transposed."""
    for launch in [*named(launches, *QUANTISING), *named(launches, "transpose")]:
        if launch["kernel"] in ("cast_tensor", "cast_rows", "quantize_tiles", "write_values", "_transpose"):
            assert "ld.global.v4.b32" in launch["opcodes"], launch["name"]
            stores = {o for o in launch["opcodes"] if o.startswith("st.global")}
            assert "st.global.v4.b32" in stores, launch["name"]
            assert "st.global.b8" not in stores or launch["name"] == "mx", f"{launch['name']}: single bytes"


def test_the_gemm_runs_on_fp8_tensor_cores(launches):
    for name, kinds in (("matmul", "e4m3.e4m3"), ("matmul-wgrad", "e5m2.e4m3")):
        (launch,) = [launch for launch in launches if launch["name"] == name]
        found = [o for o in launch["opcodes"] if o.startswith("wgmma.mma_async")]
        assert found and all(kinds in o for o in found), found
