"""`megatron-fp8 compare` as people use it: ended in the middle, given again, and read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest

from benchmarks.support.forked import Forked
from megatron_fp8.commands.main import main
from megatron_fp8.study.compare import launch
from tests.support.command import lines


@pytest.mark.parametrize("how", ["forked", pytest.param("real", marks=pytest.mark.long)])
def test_a_comparison_that_is_ended_goes_on_where_it_was(tmp_path, config, capsys, monkeypatch, how):
    started = []

    def popen(*args, **kwargs):
        started.append((Forked if how == "forked" else subprocess.Popen)(*args, **kwargs))
        return started[-1]

    processes = SimpleNamespace(
        Popen=popen, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired
    )
    monkeypatch.setattr(launch, "subprocess", processes)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "out"
    options = [
        f"--config={config}", "--recipes=mxfp8", "--seeds=1", f"--out={out}",
        "--checkpoint.save_interval=1", "--train.train_iters=8",
    ]  # fmt: skip
    metrics = out / "runs" / "bf16-seed-1234" / "metrics.jsonl"

    def end_it() -> None:
        while (
            not (metrics.exists() and metrics.read_bytes().count(b"\n"))
            and threading.main_thread().is_alive()
        ):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)  # the command listens while a run trains

    threading.Thread(target=end_it, daemon=True).start()
    assert main(["compare", *options]) == 130
    assert len(started) == 1 and started[0].poll() is not None, "its run ended with it"
    before = lines(metrics)
    assert 1 <= len(before) <= 8 and not (out / "compare.json").exists()

    assert main(["compare", *options]) == 0
    printed = capsys.readouterr()
    after = lines(metrics)
    assert len(after) == 8 and after[: len(before)] == before, "no iteration was trained twice"
    content = json.loads((out / "compare.json").read_text())
    assert content["format"] == "megatron_fp8 comparison 1" and content["seeds"] == [1234]
    assert [row["recipe"] for row in content["recipes"]] == ["bf16", "mxfp8"]
    bf16, mxfp8 = content["recipes"]
    final = lines(out / "runs" / "mxfp8-seed-1234" / "validation.jsonl")[-1]["validation_loss"]
    assert mxfp8["loss"] == final and mxfp8["differences"] == [final - bf16["loss"]] != [0]
    assert (bf16["fp8_gemms"], bf16["hp_gemms"]) == (0, 102) and (mxfp8["fp8_gemms"], mxfp8["hp_gemms"]) == (
        24,
        78,
    )
    tokens, layers, hidden = 2 * 64, 4, 64
    for row in (bf16, mxfp8):  # a layer keeps more than its input, in BF16; a process is larger than that
        assert 2 * tokens * hidden * layers < row["saved_bytes"] < row["peak_bytes"]
    assert mxfp8["saved_bytes"] != bf16["saved_bytes"]
    assert "one seed shows no band" in content["verdict"] and content["verdict"] in printed.out
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert content["verdict"] in (out / "compare.md").read_text()
    assert "mxfp8-seed-1234" in (out / "compare.html").read_text()
    assert "training mxfp8, seed 1234" in printed.err

    # Given a third time it trains nothing.
    assert main(["compare", *options]) == 0
    assert len(started) == 3, "bf16 twice, mxfp8 once"
    assert "2 of 2 runs are there already" in capsys.readouterr().err
    assert json.loads((out / "compare.json").read_text()) == content
    # A validation line that is cut in half is said. Nothing is trained then, so what training counted stays.
    run = out / "runs" / "mxfp8-seed-1234"
    whole = (run / "validation.jsonl").read_bytes()
    (run / "validation.jsonl").write_bytes(whole[:-9])
    assert main(["compare", *options]) == 1
    said = capsys.readouterr().err
    assert f"{run / 'validation.jsonl'} ends with iteration" in said and "its last line is cut off" in said
    assert "iterations in" not in said
    assert json.loads((run / "report.json").read_text())["saved_bytes"] == mxfp8["saved_bytes"]
    (run / "validation.jsonl").write_bytes(whole)
    # Another length is another comparison.
    assert main(["compare", *options, "--train.train_iters=9"]) == 2
    assert "holds a run with train.train_iters=8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "--config"),
        (["--config=nope.yaml"], "there is no such file"),
        (["--config=CONFIG", "--recipes=fp4"], "'fp4' is unknown"),
        (["--config=CONFIG", "--ranks=0"], "--ranks=0 must be at least 1"),
        (["--config=CONFIG", "--ranks=-1"], "--ranks=-1 must be at least 1"),
        (["--config=CONFIG", "--out=/dev/null"], "--out=/dev/null cannot be used"),
        (["--config=CONFIG", "--ranks=3", "--model.tensor_model_parallel_size=2"], "does not divide"),
    ],
)
def test_bad_input_is_one_line(config, capsys, arguments, words):
    assert main(["compare", *(part.replace("CONFIG", str(config)) for part in arguments)]) == 2
    said = capsys.readouterr().err
    assert words in said and said.startswith("error: ") and said.count("\n") == 1


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as left:
        main(["compare", "--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0 and all(
        word in said for word in ("--seeds 3", "goes on", "shows no such band")
    )
