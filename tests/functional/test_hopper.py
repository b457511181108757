"""Every kernel compiled for an H100, on any machine: what the instructions show."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


SOME = (
    *(
        "measure",
        "delayed",
        "tensorwise",
        "rowwise",
        "blockwise",
        "mx",
        "norm",
        "norm-written",
        "swiglu",
        "swiglu-grad",
    ),
    *("swiglu-weight-grad", "transpose", "piece-amax", "piece-cast", "update", "update-short"),
    *("matmul", "matmul-wgrad", "matmul-wgrad-added", "matmul-grouped", "matmul-grouped-wgrad"),
    *("matmul@100", "matmul-grouped@100", "matmul@120"),
    *(
        "nvfp4",
        "nvfp4-factor",
        "nvfp4-amaxes@100",
        "nvfp4@100",
        "nvfp4-stochastic@100",
        "nvfp4@120",
        "nvfp4-weight@120",
    ),
)
"""Each kernel, with each format and source. The others are of other scales, or of rows that 16 does not divide."""


@pytest.fixture(scope="module", params=[SOME, pytest.param((), marks=pytest.mark.long)], ids=["some", "all"])
def launches(request):
    """What hopper.py prints of these launches, in a process that does not interpret.

    Triton keeps what it compiles by a hash of the kernel, of all it calls and of the compiler: in this clone's folder
    only kernels that changed are compiled again.
    """
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(ROOT / "build" / "hopper")}
    out = subprocess.run(
        [sys.executable, "-m", "tests.support.hopper", *request.param],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=400,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    return [json.loads(line) for line in out.stdout.splitlines()]


def named(launches, *prefixes):
    found = [launch for launch in launches if launch["name"].startswith(prefixes)]
    assert found
    return found


QUANTISING = ("delayed", "tensorwise", "rowwise", "blockwise", "mx", "norm", "swiglu", "nvfp4")


def test_nothing_flushes_subnormals_or_approximates(launches):
    """IEEE products, divisions and roots. SwiGLU's sigmoid is approximate, and has nothing to flush."""
    for launch in launches:
        opcodes = set(launch["opcodes"])
        loose = {o for o in opcodes if ".ftz" in o or ".approx" in o or ".full" in o}
        sigmoid = {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"} if "swiglu" in launch["name"] else set()
        assert loose == sigmoid, launch["name"]
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
    """Registers suffice, and those of two programs fit a multiprocessor."""
    for launch in launches:
        least = 0 if launch["name"].startswith("matmul") else 32
        assert launch["stack"] <= least, f"{launch['name']} spills {launch['stack']} bytes a thread"
    for launch in named(launches, *QUANTISING):
        assert launch["stack"] == 0, f"{launch['name']} spills"
        assert 2 * launch["registers"] * 32 * launch["warps"] <= 65536, launch["name"]


def test_four_bits_have_an_instruction_where_gpus_have_it(launches):
    """Where not, and if rounded stochastically, codes are arithmetic; sm_120 has no instruction for that."""
    for launch in named(launches, "nvfp4"):
        instruction = "cvt.rn.satfinite.e2m1x2.f32" in launch["opcodes"]
        blackwell = "@" in launch["name"] and launch["kernel"] == "cast_fp4"
        assert instruction == (
            blackwell and "stochastic" not in launch["name"] and "grad" not in launch["name"]
        ), launch["name"]
        assert not [o for o in launch["opcodes"] if o.startswith("cvt.rs")], launch["name"]


def test_memory_is_accessed_sixteen_bytes_at_a_time(launches):
    """Also where codes are written transposed."""
    for launch in [*named(launches, *QUANTISING), *named(launches, "transpose")]:
        if launch["kernel"] in ("cast_tensor", "cast_rows", "quantize_tiles", "write_values", "_transpose"):
            assert "ld.global.v4.b32" in launch["opcodes"], launch["name"]
            stores = {o for o in launch["opcodes"] if o.startswith("st.global")}
            assert "st.global.v4.b32" in stores, launch["name"]
            assert "st.global.b8" not in stores or launch["name"] == "mx", f"{launch['name']}: single bytes"


CEILINGS = {"delayed": 8.0, "tensorwise": 7.0, "blockwise": 15.0, "mx": 14.0, "norm": 13.5, "swiglu": 22.5}
"""Instructions a value, a little above what they are (benchmarks/results/instructions.md)."""


@pytest.mark.parametrize("name", CEILINGS)
def test_instructions_a_value(launches, name):
    """Without them memory would wait for arithmetic: nothing else here shows a conversion or an exchange too many."""
    (launch,) = [launch for launch in launches if launch["name"] == name and launch["issued"]]
    assert launch["issued"] / (8192 * (2048 if name == "swiglu" else 4096)) <= CEILINGS[name]


def test_the_gemm_loads_codes_by_tensor_descriptors(launches):
    """On compute capability 9.x and 10.x."""
    for launch in named(launches, "matmul"):
        tma = any(opcode.startswith("cp.async.bulk.tensor") for opcode in launch["opcodes"])
        assert tma == (not launch["name"].endswith("@120")), launch["name"]


def test_the_gemm_runs_on_fp8_tensor_cores(launches):
    gemms = {"matmul": "e4m3.e4m3", "matmul-wgrad": "e5m2.e4m3", "matmul-grouped": "e4m3.e4m3"}
    for name, kinds in gemms.items():
        (launch,) = [launch for launch in launches if launch["name"] == name]
        found = [o for o in launch["opcodes"] if o.startswith("wgmma.mma_async")]
        assert found and all(kinds in o for o in found), found
