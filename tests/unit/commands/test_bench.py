"""`megatron-fp8 bench` on tiny shapes: nothing wrong is timed, and --tune writes a table that the filter takes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_fp8.backends import emulated
from megatron_fp8.commands.main import main
from megatron_fp8.plan.gemm_size_table import Gemm, load_table
from megatron_fp8.plan.timing import processor_name
from megatron_fp8.study import bench as bench_run

ROOT = Path(__file__).parents[3]
SMALL = ["--shape=48x40x36", "--repetitions=4"]
RECIPES = ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]
CONFIG = f"--config={ROOT / 'examples/configs/tiny_gpt_cpu.yaml'}"


def bench(*arguments: str) -> int:
    return main(["bench", *arguments])


def test_every_recipe_is_right_and_timed(tmp_path, capsys):
    out = tmp_path / "bench.json"
    assert bench(*SMALL, "--fp8=e4m3", f"--out={out}") == 0
    record = json.loads(out.read_text())
    assert record["device"] == processor_name() and record["versions"]["torch"] == torch.__version__
    assert record["threads"] == torch.get_num_threads() and record["date"]
    rows = {(row["section"], row["contender"]): row for row in record["rows"]}
    assert set(rows) == {
        (section, recipe) for section in ("quantise", "gemm", "linear") for recipe in RECIPES
    }
    for row in rows.values():
        assert (row["k"], row["n"], row["tokens"]) == (48, 40, 36)
        assert row["fp8_ms"] > 0 and row["bf16_ms"] > 0 and row["ratio"] > 0 and row["spread"] >= 0
    assert "| linear " in (said := capsys.readouterr().out) and processor_name() in said
    assert (
        said.splitlines()[-2].startswith("FP8 against BF16 here, by linear: ")
        and "wrote" in said.splitlines()[-1]
    )


def test_the_verdict_tells_no_more_than_ratios_and_their_spread():
    def row(section, contender, ratio, spread):
        return {"section": section, "contender": contender, "ratio": ratio, "spread": spread}

    linears = [
        *(row("linear", "mxfp8", ratio, 0.1) for ratio in (0.6, 0.94)),
        row("linear", "rowwise", 0.96, 0.1),  # within its spread
        *(row("linear", "delayed", ratio, 0.02) for ratio in (0.8, 1.2)),
        row("linear", "tensorwise", 1.3, 0.1),
    ]
    quantized = row("quantise", "mxfp8", 2.0, 0.1)  # against a copy: says nothing of a run
    assert bench_run.verdict([quantized, *linears]) == (
        "FP8 against BF16 here, by linear: faster: mxfp8 (0.60 to 0.94 x); slower: tensorwise (1.30 x);"
        " mixed: delayed (0.80 to 1.20 x); too noisy to tell: rowwise (0.96 x, spread up to 10%)."
    )
    assert bench_run.verdict([row("step", "mxfp8", 0.5, 0.1), *linears]).endswith(
        "by step: faster: mxfp8 (0.50 x)."
    )
    assert bench_run.verdict([quantized]) == "" == bench_run.verdict([row("linear", "mxfp8", 0.5, None)])


WRONG = {
    "gemm": lambda a, b, **options: RIGHT["gemm"](a, b, **options) * 1.02,
    "quantize_each": lambda asked: RIGHT["quantize_each"]([one._replace(x=one.x * 1.2) for one in asked]),
}
RIGHT = {name: getattr(emulated, name) for name in WRONG}


@pytest.mark.parametrize("name, sections", [("gemm", {"gemm"}), ("quantize_each", {"quantise", "linear"})])
def test_what_is_wrong_is_not_timed_and_fails(tmp_path, monkeypatch, capsys, name, sections):
    """A product 2 % off is caught with its codes at hand; codes 20 % off are caught as such and in a linear."""
    monkeypatch.setattr(emulated, name, WRONG[name])
    out = tmp_path / "bench.json"
    assert bench(*SMALL, "--recipe=mxfp8", f"--out={out}") == 1
    printed = capsys.readouterr()
    for section in ("quantise", "gemm", "linear"):
        assert (f"WRONG, not timed: {section} K 48 x N 40" in printed.err) == (section in sections)
        assert (f"| {section} " in printed.out) == (section not in sections)
    assert "nothing is written" in printed.err and not out.exists()


def test_wrong_gradients_are_no_table(tmp_path, monkeypatch, capsys):
    from megatron_fp8.linear.gemm_site import GemmSite

    multiply = GemmSite.multiply

    def wrong_wgrad(self, gemm, *args, **options):
        return multiply(self, gemm, *args, **options) * (-1 if gemm == "wgrad" else 1)

    monkeypatch.setattr(GemmSite, "multiply", wrong_wgrad)
    out = tmp_path / "table.json"
    assert bench(*SMALL, "--tune", f"--out={out}") == 1
    assert "WRONG, not timed: linear" in capsys.readouterr().err and not out.exists()


def test_tune_writes_a_table_of_the_shapes_given(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_run, "is_replaced", lambda dtype: True)
    out = tmp_path / "table.json"
    assert bench("--tune", f"--out={out}", *SMALL, "--shape=16x16x8", "--recipe=rowwise") == 0
    table = load_table(str(out))
    assert (table.device, table.backend, table.recipe) == (processor_name(), "emulated", "rowwise")
    assert list(table.ratios) == [Gemm(48, 40, 36), Gemm(16, 16, 8)]
    assert table.roles["grad_output"] == "e5m2 row pow2"
    assert "FP8 pays for " in capsys.readouterr().out
    # Ratios to a baseline that this package made faster are not to be read as ratios to torch's.
    assert json.loads(out.read_text())["torch_bf16"] == "in float32, without instructions for it"


def test_tune_measures_the_gemms_of_a_config(tmp_path, monkeypatch):
    """One layer's GEMMs on one of the two tensor-parallel ranks, in the run's recipe: what the run's filter asks for."""
    from megatron_fp8.fp8_utils import get_fp8_recipe
    from megatron_fp8.train.config import run_config
    from megatron_fp8.train.config.model_section import transformer_config

    out = tmp_path / "table.json"
    smaller = ["--train.micro_batch_size=1", "--train.seq_length=64", "--model.fp8_format=blockwise"]
    smaller.append("--model.tensor_model_parallel_size=2")
    asked = f"--model.fp8_size_filter={out}"  # the run asks for the table already
    assert bench(CONFIG, *smaller, asked, "--tune", f"--out={out}", "--repetitions=4") == 0
    table = load_table(str(out))
    assert list(table.ratios) == [
        Gemm(256, 256, 64),
        Gemm(128, 256, 64),
        Gemm(256, 768, 64),
        Gemm(384, 256, 64),
    ]
    config = transformer_config(run_config.load(CONFIG.removeprefix("--config="), *smaller, asked).model)
    assert table.roles == load_table(str(out)).roles and config.fp8_size_filter == str(out)
    content = json.loads(out.read_text())
    content["rows"][0] |= {"ratio": 0.5, "spread": 0.0}
    out.write_text(json.dumps(content))
    load_table(str(out)).check(processor_name(), "emulated", get_fp8_recipe(config))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--shape=1x2"], "--shape=1x2 must be three positive integers, KxNxTOKENS"),
        (["--tune"], "add --out FILE"),
        (["--tune", "--out=t.json", "--repetitions=3"], "--tune tells noise: give at least 4"),
        (["--out=no/such/folder/t.json"], "there is no such folder"),
        ([f"--out={'x' * 300}"], "cannot be written (File name too long): give another file"),
        (["--recipe=tensorwize"], "'tensorwize' is unknown"),
        (["--only=gem"], "'gem': sections are quantise, gemm, linear, layer, step, inference, or all"),
        (["--threads=100000"], "--threads=100000 must be from 1 to 1024"),
        (["--tune", "--out=t.json", "--json"], "without it"),
        ([f"--compare={ROOT / 'benchmarks/results/cast.json'}"], "is no result of bench"),
        (["--backend=native"], "cannot run on cpu"),
        (["--model.fp8=hybrid"], "a run's options need --config FILE"),
        ([CONFIG, "--model.fp8=null"], "trains in BF16: add --model.fp8=hybrid"),
    ],
)
def test_bad_input_is_named_before_anything_runs(capsys, monkeypatch, arguments, words):
    monkeypatch.setattr(bench_run, "Bench", None)
    assert bench(*arguments) == 2
    assert words in (said := capsys.readouterr().err) and said.startswith("error: ") and said.count("\n") == 1


def test_larger_cells_are_right_and_in_the_same_table(capsys):
    """As JSON on stdout alone, against what was measured a moment ago."""
    recipe = "delayed"
    options = [*SMALL, f"--recipe={recipe}", "--only=layer,step,inference", "--json"]
    assert bench(*options) == 0
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert [row["section"] for row in record["rows"]] == ["layer", "step", "inference"]
    assert all(row["fp8_ms"] > 0 and row["contender"] == recipe for row in record["rows"])
    assert "| section " in printed.err and "spread" in printed.err


def test_a_wrong_layer_is_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(emulated, "gemm", lambda a, b, **options: RIGHT["gemm"](a, b, **options) * 2)
    assert bench(*SMALL, "--recipe=mxfp8", "--only=layer,inference") == 1
    said = capsys.readouterr()
    assert "WRONG, not timed: layer" in said.err and "WRONG, not timed: inference" in said.err
    assert "| layer " not in said.out


def test_an_earlier_result_is_compared_and_a_peer_joins(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torchao")
    out = tmp_path / "old.json"
    options = [*SMALL, "--recipe=tensorwise", "--only=linear"]
    assert bench(*options, "--peers", f"--out={out}") == 0
    record = json.loads(out.read_text())
    assert [row["contender"] for row in record["rows"]] == ["tensorwise", "torchao tensorwise"]
    record["rows"][0] |= {"ratio": record["rows"][0]["ratio"] * 1e4, "spread": 0.0}
    out.write_text(json.dumps(record))
    monkeypatch.setattr(bench_run, "TOO_NOISY", math.inf)  # on a machine that does other things, too
    capsys.readouterr()
    assert bench(*options, f"--compare={out}") == 0
    said = capsys.readouterr().out
    assert "Of 1 cells: 1 faster, 0 slower, 0 within noise." in said
    out.write_text(json.dumps(record | {"device": "another"}))
    assert bench(*options, f"--compare={out}") == 2
    assert "is of device 'another'" in capsys.readouterr().err


def test_a_name_that_is_no_text_is_printed_and_a_full_disk_is_said(tmp_path, capsys):
    tiny = ["bench", "--only=quantise", "--recipe=rowwise", "--shape=16x16x1", "--repetitions=1"]
    assert main([*tiny, f"--out={tmp_path}/\udcff"]) == 0
    assert "wrote" in capsys.readouterr().out and (tmp_path / "\udcff").exists()
    assert main([*tiny, "--out=/dev/full"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert (
        last
        == "error: --out=/dev/full cannot be written (No space left on device): what was measured is lost"
    )
