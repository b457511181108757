"""The GPU check and benchmark, as far as a CPU takes them: what they say without a GPU, and their dry runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    gpu_attention,
    gpu_check,
    gpu_checks,
    gpu_child,
    gpu_common,
    gpu_environment,
    gpu_fused,
    gpu_graph,
    gpu_sanitiser,
    gpu_sections,
    gpu_training,
)
from benchmarks.gpu_common import Machine
from benchmarks.support.ranks import RankPool, model_parallel
from megatron_fp8.backends import emulated
from megatron_fp8.kernels import block_matmul
from tests.support.native_gpt import native_on_cpu
from tests.support.scaled_mm import fake_torch


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, one_thread: None):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Told:
    """What a process of checks would tell: results and rows."""

    def __init__(self) -> None:
        self.results: dict[str, dict[str, Any]] = {}
        self.rows: dict[tuple[str, ...], dict[str, Any]] = {}

    def __call__(self, **event: Any) -> None:
        if "result" in event:
            self.results[event["result"]["check"]] = event["result"]
        if "row" in event:
            row = json.loads(json.dumps(event["row"]))
            self.rows[row["section"], row["case"], row["contender"]] = row


def served(module: Any, *names: str) -> Told:
    """Checks of a module, run here."""
    told = Told()
    machine = gpu_common.open_machine(dry=True)
    machine.tell = told
    gpu_child.serve(module.checks(), names, machine, told, each=120)
    return told


def test_without_a_gpu_they_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--out", str(tmp_path)])
    assert ended.value.code == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no GPU to run on: it needs an NVIDIA GPU") and "--dry-run" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options, message",
    [
        (
            ["--only", "codes,nonsense"],
            "error: no check has 'nonsense' in its name: there are variants, digests",
        ),
        (["--minutes", "0"], "error: --minutes 0 --repetitions 20: both must be above 0"),
        (["--minutes", "nan"], "error: --minutes nan --repetitions 20: both must be above 0"),
        (["--repetitions", "0"], "error: --minutes 9 --repetitions 0: both must be above 0"),
    ],
)
def test_bad_options(options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


def test_dry_check():
    there = (
        "codes mxfp8", "gemm mxfp8", "gradients mxfp8", "no waiting mxfp8", "experts mxfp8", "graph mxfp8",
    )  # fmt: skip
    around = ("captured step delayed", "compiled delayed")
    blocks = ("attention flash", "attention cudnn")
    found = (
        served(gpu_checks, *there).results
        | served(gpu_graph, *around).results
        | served(gpu_attention, *blocks).results
    )
    graph = found.pop("graph mxfp8")
    assert (graph["verdict"], graph["detail"], graph["final"]) == ("not run", "needs a GPU", True)
    assert {name: result["verdict"] for name, result in found.items()} == dict.fromkeys(
        (*there[:-1], *around, *blocks), "PASS"
    )


def test_a_wrong_code_or_product_fails_the_check(monkeypatch: pytest.MonkeyPatch):
    """The harness itself: one flipped bit of one code, or results a percent off, are FAIL."""

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
        monkeypatch.setattr(Machine, "backend", property(lambda self, backend=backend: backend))
        result = served(gpu_checks, check).results[check]
        assert result["verdict"] == "FAIL"
        assert ("first at (0, 4)" if "codes" in check else "of |a| |b|") in result["detail"]


@pytest.mark.parametrize("off", [1, 1.01])
def test_this_packages_product_is_checked_where_torch_has_its_own(
    off: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_checks, "PRECOMPILED", [(36, 144, 130)])
    monkeypatch.setattr(gpu_checks, "experts", lambda *_: "experts")
    kernel = block_matmul.block_matmul
    with native_on_cpu(), fake_torch() as fake:
        monkeypatch.setattr(block_matmul, "block_matmul", lambda *a, **more: kernel(*a, **more) * off)
        check = gpu_checks.checks()["own product blockwise"]
        monkeypatch.setattr(Machine, "synchronize", lambda self: None)
        machine = Machine(torch.device("cpu"), dry=False)
        verdict, detail, _ = gpu_child.judged(lambda: check(machine), machine)
    assert fake.calls and set(fake.calls) == {"block", "block 1d"}, "what the recipe's support was asked for"
    assert verdict == ("PASS" if off == 1 else "FAIL"), detail
    assert detail.endswith("-> bfloat16 by kernels/block_matmul.py; experts") == (off == 1), detail


def test_dry_benchmark():
    names = (
        "roofline", "gemm", "quantise", "linear", "experts", "expert products", "layer 4096", "layer 8192",
        "fused",
    )  # fmt: skip
    told = served(gpu_sections, *(f"bench {name}" for name in names))
    verdicts = {name: result["verdict"] for name, result in told.results.items()}
    assert verdicts.pop("bench layer 8192") == "not run" and set(verdicts.values()) == {"PASS"}, told.results
    found = list(told.rows.values())
    sections = {"roofline", "gemm", "quantise", "linear", "experts", "expert products", "layer", "fused"}
    assert {row["section"] for row in found} == sections
    missing = {row["contender"]: row["rate"] for row in found if row["median_s"] is None}
    assert "TE delayed" in missing and all(missing.values()), "what was not measured says why"
    layer = {row["contender"]: row for row in found if row["section"] == "layer" and row["median_s"]}
    assert {"bf16", "delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"} <= set(layer)
    assert layer["bf16"]["speedup"] == 1 and layer["mxfp8"]["speedup"] > 0
    experts = {row["contender"]: row.get("speedup") for row in found if row["section"] == "experts"}
    assert experts["mxfp8, grouped"] > 0 and experts["mxfp8, in turn"] > 0 and experts["bf16, grouped"] > 0
    assert missing["torchao mxfp8, grouped"] and missing["rowwise, torch grouped"]
    peaks = {row["contender"]: row["peak"] for row in found if row["section"] == "roofline"}
    assert set(peaks) == {"copy", "bf16"} and all(peak > 0 for peak in peaks.values())
    assert all("of the copy's" in row["rate"] for row in found if row["section"] == "quantise")


def test_a_layer_is_held_against_the_rooflines_of_the_run():
    """Its peaks were measured by another process, whose rows it is handed."""
    peaks = {"copy": 1e9, "bf16": 1e15, "bare scaled_mm": 2e15}
    machine = Machine(torch.device("cpu"), True, peaks=peaks)
    machine.tell = told = Told()
    gpu_child.serve(gpu_sections.checks(), ["bench layer 4096"], machine, told, each=120)
    rates = {contender: row["rate"] for (_, _, contender), row in told.rows.items()}
    assert "of this run's roofline" in rates["mxfp8"] and rates["bf16"] == ""


def test_nothing_wrong_is_timed(monkeypatch: pytest.MonkeyPatch):
    backend = SimpleNamespace(name="emulated", supports=emulated.supports, quantize=emulated.quantize)
    backend.gemm = lambda a, b, **options: 2 * emulated.gemm(a, b, out_dtype=torch.bfloat16)
    monkeypatch.setattr(Machine, "backend", property(lambda self: backend))
    told = served(gpu_sections, "bench gemm")
    assert {contender for _, _, contender in told.rows} == {"bf16"}
    result = told.results["bench gemm"]
    assert result["verdict"] == "FAIL"
    assert result["detail"].startswith("wrong, and not timed: gemm 64 x 96 x 128 delayed: off by 1.0e+00")


@pytest.mark.parametrize("module", [gpu_training, gpu_fused])
def test_cublas_is_deterministic_before_its_first_product(module: Any, monkeypatch: pytest.MonkeyPatch):
    """Asking what a GPU supports multiplies, and cuBLAS reads its setting once: every later product would be refused."""
    calls: list[str] = []

    def asked(*_: Any) -> None:
        calls.append("supported")
        raise gpu_common.NotRun("enough")

    monkeypatch.setattr(module, "supported", asked)
    monkeypatch.setattr(module, "set_deterministic", lambda: calls.append("deterministic"))
    deterministic = [name for name in module.checks() if name.partition(" ")[0] not in ("update", "masters")]
    for name in deterministic:
        calls.clear()
        with pytest.raises(gpu_common.NotRun, match="enough"):
            module.checks()[name](Machine(torch.device("cpu"), dry=False))
        assert calls == ["deterministic", "supported"], name


def test_dry_training_on_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As from the command line: each group in a process of its own, where Megatron-Core is patched."""
    for name in ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "1")
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path), "--only", "training rowwise"]) == 0
    check = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [(r["check"], r["verdict"]) for r in check["results"]] == [("training rowwise", "PASS")]
    assert check["environment"]["dry"] and "torch" in check["environment"]["versions"]
    ended = [(process["group"], process["ended"]) for process in check["processes"]]
    assert ended == [("training", "exit code 0")]
    assert "| training rowwise | PASS |" in " ".join((tmp_path / "gpu_check.md").read_text().split())


def steps_on_megatron() -> Told:
    """A rank case."""
    with model_parallel():
        return served(gpu_sections, "bench step")


def test_dry_steps_on_megatron(ranks: RankPool):
    (told,) = ranks(1).run(steps_on_megatron)
    assert told.results["bench step"]["verdict"] == "PASS"
    steps = {contender: row["median_s"] for (_, _, contender), row in told.rows.items()}
    assert set(steps) == {"bf16", "delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"}
    assert all(steps.values())


def tool(folder: Path, name: str, *lines: str) -> None:
    """A program by this name, first on the PATH."""
    path = folder / name
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)


SANITISER = {
    "clean": (["echo '========= ERROR SUMMARY: 0 errors'"], "PASS", "ERROR SUMMARY: 0 errors"),
    "found": (["echo '========= Invalid __global__ write of size 4 bytes'; exit 9"], "FAIL", "Invalid __global__ write"),
    "refused": (["echo 'Device not supported'; exit 1"], "not run", "not even around one addition: Device not supported"),
    "program": (
        ['case "$*" in *gpu_sanitiser*) echo "ImportError: no such kernel"; exit 1;; esac'],
        "FAIL",
        "ImportError: no such kernel",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SANITISER)
def test_the_sanitiser(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What it found is a failure; where the tool itself does not run, the check did not either."""
    lines, verdict, said = SANITISER[case]
    tool(tmp_path, "compute-sanitizer", *lines)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    machine = Machine(torch.device("meta"), dry=False)
    monkeypatch.setattr(Machine, "synchronize", lambda self: None)
    found = gpu_child.judged(lambda: gpu_sanitiser.sanitiser(machine), machine)
    assert found[0] == verdict and said in found[1], found


def test_environment_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Device, capability, clocks and power; without nvidia-smi the rest."""
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    tool(tmp_path, "nvidia-smi", "echo '580.1, P0, 120.0 W, 700.00 W, 345 MHz, 1980 MHz, 3201 MHz, 30, 0x1'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    record = gpu_environment.environment(dry=False)
    assert (record["device"], record["capability"], record["memory_GiB"]) == ("NVIDIA H200", "9.0", 141.0)
    assert record["power"]["clocks.sm"] == "345 MHz" and record["power"]["power.limit"] == "700.00 W"
    said = gpu_environment.describe(record)
    assert all(
        word in said
        for word in ("NVIDIA H200", f"torch {torch.__version__}", record["source"], "clocks.max.sm 1980")
    )
    tool(tmp_path, "nvidia-smi", "exit 9")
    assert gpu_environment.power_state() == {}
