"""Runs that must not go on: ranks that want different runs, weights that are NaN, a corpus that somebody cuts short."""

import json
import shutil

import pytest

from tests.support.command import APP, TWO_RANKS, lines, run, torchrun


def errors(done):
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


def test_ranks_that_differ_end_with_2_before_the_first_step_and_one_line_says_why(
    folder, config, forking_python
):
    out, options = folder / "runs" / "differ", folder / "options.json"
    options.write_text(json.dumps({"1": ["--optimizer.lr=0.5", "--model.fp8_recipe=mxfp8"]}))
    command = [APP, "ranks", options, "train", f"--config={config}", f"--run_dir={out}", *TWO_RANKS]
    done = torchrun(*command, python=forking_python)
    assert done.returncode != 0
    (said,) = errors(done)
    assert "optimizer.lr is 0.01 on rank 0 and 0.5 on rank 1" in said
    assert 'model.fp8_recipe is "delayed" on rank 0 and "mxfp8" on rank 1' in said
    assert done.stderr.count("exitcode  : 2 ") == 2, done.stderr
    assert not out.exists()


def test_no_room_for_indices_on_rank_0_ends_both_with_2_and_one_line(folder, config, forking_python):
    """Rank 1 waits in Megatron-Core's barrier, which has a timeout of half an hour."""
    out, cache = folder / "runs" / "unindexed", folder / "unindexed"
    options = [f"--config={config}", f"--run_dir={out}", f"--data.cache_dir={cache}", *TWO_RANKS]
    done = torchrun(APP, "unindexed", 0, "train", *options, python=forking_python)
    (said,) = errors(done)
    assert f"data.cache_dir={str(cache)!r}: the indices of samples cannot be written (No space left" in said
    assert done.stderr.count("exitcode  : 2 ") == 2, done.stderr


def test_steps_that_are_skipped_for_ever_end_the_run_as_failed(folder, config):
    out = folder / "runs" / "spoiled"
    more = ["--train.train_iters=20", "--train.max_skipped_steps=3", "--checkpoint.save_interval=1"]
    more += ["--train.log_interval=1", "--train.eval_iters=0"]
    done = run(APP, "spoil", 2, "train", f"--config={config}", f"--run_dir={out}", *more)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    (said,) = errors(done)
    assert "3 steps in a row were skipped" in said and "3 of 5 steps were skipped" in said
    assert "first, the master of " in said and " holds NaN or Inf on rank 0. " in said
    assert [line["skipped"] for line in lines(out / "metrics.jsonl")] == [0, 0, 1, 1, 1]
    assert "gradient norm " in done.stdout and "  lr 0.01  " in done.stdout


def test_a_corpus_that_is_cut_short_while_it_is_read_is_an_error_with_its_name(folder, config):
    prefix = next((folder / "cache").glob("*/corpus.bin"), None)
    if prefix is None:
        pytest.fail("run this test after one that prepared the text")
    for ending in (".bin", ".idx"):
        shutil.copy(prefix.with_suffix(ending), folder / f"cut{ending}")
    out = folder / "runs" / "cut"
    more = [f"--data.paths=['{folder / 'cut'}']", "--train.train_iters=8", "--train.eval_iters=0"]
    done = run(APP, "truncate", 2, "train", f"--config={config}", f"--run_dir={out}", *more)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    (said,) = errors(done)
    assert "cut.bin' had " in said and "has 4096 now" in said
