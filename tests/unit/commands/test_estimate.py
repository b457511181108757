"""`megatron-fp8 estimate` from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import estimates
from megatron_fp8.commands.main import main
from megatron_fp8.estimate.text import how_far_off, pays

TINY, LLAMA = "examples/configs/tiny_gpt_cpu.yaml", "examples/configs/llama3_8b.yaml"


def test_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--config", LLAMA, "--gpus", "64", "--device", "h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"]["total"] == found["parameters"]["active"] == 8_030_261_248
    assert found["bytes"]["total"] == max(stage["total"] for stage in found["stages"])
    held = found["bytes"]
    parts = ("weights", "kept_codes", "gradients", "masters", "moments", "activations", "working")
    assert held["total"] == sum(held[part] for part in parts)
    assert found["step_seconds"] > 0 and 0 < found["mfu"] < 1 and found["wire"]
    assert found["kind"] == "roofline from peaks, not a measurement"
    assert found["bf16"]["step_seconds"] > found["step_seconds"]
    assert len(found["sites"]) == 32 * 4 and found["fit"]["fits"]


def test_the_roofline_says_what_is_assumed_and_how_far_it_was_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--config", TINY, "--device", "h100-pcie"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "assumed of h100-pcie, not read: network_gbs, node" in said
    assert "on GPUs nobody has compared them" in said
    assert main(["estimate", "--config", TINY, "--json"]) == 0
    off = json.loads(capsys.readouterr().out)["how_far_off"]
    assert off["date"] and off["machine"] and min(off["ratio"].values()) > 1, "a roofline is a lower bound"
    assert " ".join(how_far_off().split()) in said


def test_a_note_says_when_nvfp4_is_timed_as_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    fp4 = ["--model.fp8=null", "--model.fp4=e2m1"]
    mixed = ["--model.fp8_overrides={'*.linear_fc1': nvfp4}"]
    for options, name, noted in (
        (fp4, "h100", True),
        (mixed, "h100", True),
        (fp4, "b200", False),
        ([], "h100", False),
    ):
        assert main(["estimate", "--config", TINY, "--device", name, "--json", *options]) == 0
        notes = json.loads(capsys.readouterr().out)["notes"]
        assert (f"GEMMs in NVFP4 are timed as FP8: {name} has no peak of FP4" in notes) == noted, options


@pytest.mark.parametrize(
    "options, reason",
    [
        (["h100", "--set", "model.fp8_format=mxfp8"], "begin with compute capability 10.0"),
        (["h100", "--set", "model.fp8_backend=emulated"], "fp8_backend=emulated"),
        (["mi300x"], "FNUZ"),
    ],
)
def test_fp8_that_the_doctor_refuses_there_is_not_said_to_pay(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["estimate", "--config", LLAMA, "--gpus", "64", "--device", *options]
    assert main(run) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "FP8 would not run natively" in said and reason in said and "FP8 pays" not in said
    assert main([*run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["native"]["runs"] is False and any(reason in note for note in found["notes"])


def test_a_file_without_a_generation_is_not_known_to_run_fp8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = (
        "tflops: {bf16: 7, fp8: 12}, memory_gb: 80, bandwidth_gbs: 30, link_gbs: 3, network_gbs: 4, node: 8"
    )
    path = tmp_path / "ours.yaml"
    run = ["estimate", "--config", TINY, "--device", str(path)]
    path.write_text(f"{{{figures}}}")
    assert main(run) == 0 and "FP8 may not run natively" in capsys.readouterr().out
    path.write_text(f"{{{figures}, generation: sm89}}")
    assert main(run) == 0 and "by the roofline" in capsys.readouterr().out
    path.write_text(f"{{{figures}, generation: sm9}}")
    assert main(run) == 2 and "Did you mean sm90?" in capsys.readouterr().err


def test_the_parts_of_the_time_make_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--config", TINY, "--data", "none.txt", "other.txt", "--dry_run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    time = found["time"]
    one = sum(time[part] for part in ("gemms", "attention", "elementwise", "output", "exchange"))
    whole = time["microbatches"] * one + time["reduced"] + time["optimizer"]
    assert found["step_seconds"] == pytest.approx(whole)
    page = estimates.PAGE.read_text(encoding="utf-8")
    for names in (found, found["bytes"], found["time"], found["parameters"]):
        assert all(f"`{name}`" in page for name in names)


def test_chunks_in_flight_are_called_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--config", "llama3_70b"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "chunks of 4 layers in flight" in said and "saved by one microbatch in the stage's 5 chunks" in said
    )
    assert "gradients to the previous stage" in said and "gradients to the next" not in said


def test_without_a_device_bytes_are_a_cpu_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--config=tiny_gpt_cpu", "--json"]) == 0  # a shipped one, by name
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"]["total"] == 3_410_176 and "fit" not in found
    assert found["step_seconds"] > 0 and not found["device"]["chosen"]
    assert main(["estimate", "--config=tiny_gpt_cpu", "--device=H100", "--json"]) == 0
    there = json.loads(capsys.readouterr().out)
    assert there["bytes"]["kept_codes"] > 1.9 * found["bytes"]["kept_codes"], (
        "GPUs keep codes for each direction"
    )


@pytest.mark.parametrize("config", [TINY, "examples/configs/llama3_70b.yaml"])
def test_the_table_fits_a_terminal_and_says_what_it_is(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "--config", config, "--device", "h200", "--set", "model.fp8_param=true"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for words in (
        "parameters",
        "bytes on the fullest rank",
        "roofline of h200",
        "nothing was measured",
        "fits",
    ):
        assert words in out


def test_a_run_that_does_not_fit_is_told_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "model.tensor_model_parallel_size=1", "--model.sequence_parallel", "false"]
    assert main(["estimate", "--config", LLAMA, "--gpus", "64", "--device", "h100", *options]) == 0
    out = capsys.readouterr().out
    assert "does not fit" in out and "  --model.tensor_model_parallel_size=2" in out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--config", "nowhere.yaml"], "there is no such file"),
        ([], "model.num_layers is missing: give it, or a config such as --config tiny_gpt_cpu."),
        (["--config", TINY, "--set", "model.fp8"], "write --set KEY=VALUE"),
        (["--config", TINY, "--reserve", "1"], "below 1"),
        (["--config", TINY, "--reserve", "0.2"], "--reserve=0.2 without --device"),
        (["--config", TINY, "--gpus", "0"], "--gpus=0 must be at least 1"),
        (["--config", TINY, "--device", "h10"], "Did you mean h100?"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_results_have_a_table_that_the_command_prints() -> None:
    """The others: tests/functional/test_estimate_page.py."""
    assert estimates.section("llama3_8b", "h100") in estimates.FULL.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(0.94, "FP8 pays"), (0.99, "too near to tell"), (1.04, "too near to tell"), (1.06, "FP8 does not pay")],
)
def test_a_roofline_tells_no_small_differences(ratio: float, words: str) -> None:
    of: list[Any] = [
        SimpleNamespace(time=SimpleNamespace(seconds=s), fullest=SimpleNamespace(total=1))
        for s in (ratio, 1.0)
    ]
    assert words in " ".join(pays(*of).split())
