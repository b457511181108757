"""`megatron-fp8 compare` as people use it: ended in the middle, given again, and read."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.support.fork_server import Forked, started
from megatron_fp8.commands.main import main
from megatron_fp8.study import compare_runs as launch
from tests.support.command import ROOT, environment, lines
from tests.support.process_state import put_back


@pytest.fixture(scope="module", autouse=True)
def as_in_a_process_of_its_own():
    """`compare` installs the hooks."""
    with put_back():
        yield


@pytest.mark.parametrize("how", ["forked", pytest.param("real", marks=pytest.mark.long)])
def test_a_comparison_that_is_ended_goes_on_where_it_was(tmp_path, config, capsys, monkeypatch, how):
    trained = []

    def popen(*args, **kwargs):
        trained.append((Forked if how == "forked" else subprocess.Popen)(*args, **kwargs))
        return trained[-1]

    processes = SimpleNamespace(
        Popen=popen, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired
    )
    monkeypatch.setattr(launch, "subprocess", processes)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "out"
    options = [
        f"--config={config}", "--recipes=mxfp8", "--seeds=1", f"--out={out}",
        "--checkpoint.save_interval=1", "--train.train_iters=5", "--train.eval_interval=5",
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
    assert len(trained) == 1 and trained[0].poll() is not None, "its run ended with it"
    before = lines(metrics)
    assert 1 <= len(before) <= 5 and not (out / "compare.json").exists()

    assert main(["compare", *options]) == 0
    printed = capsys.readouterr()
    after = lines(metrics)
    assert len(after) == 5 and after[: len(before)] == before, "no iteration was trained twice"
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
    assert "With one seed that may be chance" in content["verdict"] and content["verdict"] in printed.out
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert content["verdict"] in (out / "compare.md").read_text()
    assert "mxfp8-seed-1234" in (out / "compare.html").read_text()
    assert "training mxfp8, seed 1234" in printed.err

    # Given a third time it trains nothing.
    assert main(["compare", *options]) == 0
    assert len(trained) == 3, "bf16 twice, mxfp8 once"
    assert "2 of 2 runs are there already" in capsys.readouterr().err
    assert json.loads((out / "compare.json").read_text()) == content
    # The last validation's line is cut in half, as by a machine that fails: nothing is trained, that is validated again.
    run = out / "runs" / "mxfp8-seed-1234"
    whole = (run / "validation.jsonl").read_bytes()
    (run / "validation.jsonl").write_bytes(whole[:-9])
    assert main(["compare", *options]) == 0
    said = capsys.readouterr().err
    assert f"{run / 'validation.jsonl'} ends with iteration" in said and "its last line is cut off" in said
    assert "mxfp8, seed 1234: 0 iterations in" in said
    assert (run / "validation.jsonl").read_bytes() == whole, "the same loss, to the bit"
    assert json.loads((out / "compare.json").read_text()) == content
    # A line of training that is missing cannot be made again once the last checkpoint is there.
    whole = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(whole[:-9])
    assert main(["compare", *options]) == 1
    assert f"remove {run} to train it anew" in capsys.readouterr().err
    (run / "metrics.jsonl").write_bytes(whole)
    # Another length is another comparison.
    assert main(["compare", *options, "--train.train_iters=6"]) == 2
    assert "holds a run with train.train_iters=5" in capsys.readouterr().err


# Of two runs alike: everything but where they are, how fast, and how large their processes were.
OF_THE_MACHINE = {"folder", "tokens_per_s", "speed_ratio", "peak_bytes"}


def test_a_comparison_that_is_killed_with_its_ranks_goes_on_to_the_same_table(
    tmp_path, config, capfd, monkeypatch, forking_python
):
    """SIGKILL while its second run trains on two ranks: they save and end, and the next one goes on from there."""
    monkeypatch.setattr(sys, "executable", forking_python)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    iterations = 20
    options = [
        f"--config={config}", "--recipes=mxfp8", "--seeds=1", "--ranks=2", f"--train.train_iters={iterations}",
        "--checkpoint.save_interval=1000", f"--train.eval_interval={iterations}",
    ]  # fmt: skip
    assert main(["compare", *options, f"--out={whole}"]) == 0
    bf16, mxfp8 = "bf16-seed-1234", "mxfp8-seed-1234"
    shutil.copytree(whole / "runs" / bf16, killed / "runs" / bf16)  # a run that is there is taken

    metrics = killed / "runs" / mxfp8 / "metrics.jsonl"
    said = [str(tmp_path / "stdout"), str(tmp_path / "stderr")]
    command = ["-m", "megatron_fp8", "compare", *options, f"--out={killed}"]
    comparison = started(command, environment(), str(ROOT), *said, executable=forking_python)
    while not (metrics.exists() and metrics.read_bytes().count(b"\n")):
        assert comparison.is_alive(), Path(said[1]).read_text()
        time.sleep(0.02)
    comparison.kill()
    comparison.join()
    assert "1 of 2 runs are there already" in Path(said[1]).read_text()

    capfd.readouterr()
    assert main(["compare", *options, f"--out={killed}"]) == 0
    resumed = re.search(
        r"mxfp8, seed 1234: (\d+) iterations in .* \((\d+) were there\)", capfd.readouterr().err
    )
    assert resumed, "it went on from what its ranks saved when it was killed"
    assert 1 <= int(resumed[2]) < iterations and int(resumed[1]) + int(resumed[2]) == iterations
    tables = [json.loads((out / "compare.json").read_text()) for out in (whole, killed)]
    assert [row["recipe"] for row in tables[0]["recipes"]] == ["bf16", "mxfp8"] and tables[0]["ranks"] == 2
    for part in ("recipes", "runs"):
        alike = [
            [{k: v for k, v in row.items() if k not in OF_THE_MACHINE} for row in table[part]]
            for table in tables
        ]
        assert alike[0] == alike[1]
    assert tables[0]["verdict"] == tables[1]["verdict"]
