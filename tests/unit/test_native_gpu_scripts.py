"""The GPU check and benchmark, as far as a CPU takes them: what they say without a GPU, and their dry runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_bench, gpu_check
from megatron_fp8.backends import emulated

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def results(folder: Path, name: str) -> list[dict]:
    found = json.loads((folder / f"{name}.json").read_text())
    assert found["environment"]["dry"] and "torch" in found["environment"]["versions"]
    return found["results"]


@pytest.mark.parametrize("script", [gpu_check, gpu_bench])
def test_without_a_gpu_they_say_so(script, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        script.main([])
    assert ended.value.code == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no GPU to run on: it needs an NVIDIA GPU") and "--dry-run" in line


def test_dry_check(tmp_path: Path):
    for only in ("codes mxfp8", "gemm mxfp8", "gradients mxfp8", "no waiting mxfp8", "captured step delayed",
                 "compiled delayed", "graph mxfp8"):  # fmt: skip
        assert gpu_check.main(["--dry-run", "--only", only, "--out", str(tmp_path)]) == 0
        verdicts = {entry["check"]: entry["verdict"] for entry in results(tmp_path, "gpu_check")}
        assert verdicts == {only: "not run" if only == "graph mxfp8" else "PASS"}
    assert "| graph mxfp8 | not run |" in (tmp_path / "gpu_check.md").read_text()


def test_a_wrong_code_or_product_fails_the_check(tmp_path: Path, monkeypatch, capsys):
    """The harness itself: one flipped bit of one code, or results a percent off, are FAIL and exit code 1."""

    def flipped(x, *args, **options):
        found = emulated.quantize(x, *args, **options)
        found.tensor.rowwise.codes.view(torch.uint8)[-1, -1] ^= 1
        return found

    def off(a, b, **options):
        return emulated.gemm(a, b, **options) * 1.01

    right = {
        "name": "emulated",
        "supports": emulated.supports,
        "quantize": emulated.quantize,
        "gemm": emulated.gemm,
    }
    for check, wrong in (("codes rowwise", {"quantize": flipped}), ("gemm rowwise", {"gemm": off})):
        backend = SimpleNamespace(**(right | wrong))
        monkeypatch.setattr(gpu_check.Machine, "backend", property(lambda self, backend=backend: backend))
        assert gpu_check.main(["--dry-run", "--only", check, "--out", str(tmp_path)]) == 1
        (entry,) = results(tmp_path, "gpu_check")
        assert entry["verdict"] == "FAIL"
        assert ("first at (0, 4)" if "codes" in check else "of |a| |b|") in entry["detail"], entry["detail"]


def test_dry_benchmark(tmp_path: Path):
    sections = "roofline,gemm,quantise,linear,layer"
    assert gpu_bench.main(["--dry-run", "--only", sections, "--out", str(tmp_path)]) == 0
    found = results(tmp_path, "gpu_bench")
    assert {row["section"] for row in found} == set(sections.split(","))
    missing = {row["contender"]: row["rate"] for row in found if row["median_s"] is None}
    assert "TE delayed" in missing and all(missing.values()), "what was not measured says why"
    layer = {row["contender"]: row for row in found if row["section"] == "layer" and row["median_s"]}
    assert {"bf16", "delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"} <= set(layer)
    assert layer["bf16"]["speedup"] == 1 and layer["mxfp8"]["speedup"] > 0
    assert "not measured" in (tmp_path / "gpu_bench.md").read_text()


def test_nothing_wrong_is_timed(tmp_path: Path, monkeypatch):
    backend = SimpleNamespace(name="emulated", supports=emulated.supports, quantize=emulated.quantize)
    backend.gemm = lambda a, b, **options: 2 * emulated.gemm(a, b, out_dtype=torch.bfloat16)
    monkeypatch.setattr(gpu_check.Machine, "backend", property(lambda self: backend))
    assert gpu_bench.main(["--dry-run", "--only", "gemm", "--out", str(tmp_path)]) == 1
    assert {row["contender"] for row in results(tmp_path, "gpu_bench")} == {"bf16"}
    assert "WRONG, and not timed: gemm 64 x 96 x 128 delayed" in (tmp_path / "gpu_bench.md").read_text()


def test_dry_training_and_steps_on_megatron(tmp_path: Path):
    """In a process of their own, since Megatron-Core's patches are for a whole process."""
    code = (
        "import sys; from benchmarks import gpu_bench, gpu_check; options = sys.argv[1:];"
        "wrong = gpu_check.main([*options, '--only', 'training rowwise']);"
        "sys.exit(wrong or gpu_bench.main([*options, '--only', 'step']))"
    )
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, "--dry-run", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    assert [entry["verdict"] for entry in results(tmp_path, "gpu_check")] == ["PASS"]
    steps = {row["contender"]: row["median_s"] for row in results(tmp_path, "gpu_bench")}
    assert set(steps) == {"bf16", "delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"} and all(
        steps.values()
    )
