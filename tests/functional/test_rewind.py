"""Going back behind a spike: the run goes on, bit for bit, as one whose data never had these samples."""

import json
import shutil

import pytest

from benchmarks.kills import differences
from megatron_fp8.files.checkpoint import complete_checkpoints, iteration_of, read_manifest
from megatron_fp8.train.config import run_config
from megatron_fp8.train.health import skipped_samples
from tests.support.command import APP, run, torchrun

REWIND = ["--train.rewind_on_spike=2", "--checkpoint.save_interval=2", "--checkpoint.keep_last=0"]
LONGER = ["--train.train_iters=12", "--train.eval_interval=4"]
# A layer in BF16 and one in FP8; one microbatch.
SMALL = [
    "--model.num_layers=2", "--model.num_layers_at_start_in_bf16=1", "--model.num_layers_at_end_in_bf16=0",
    "--train.micro_batch_size=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def train(folder, config):
    """train(words, name, *options): a run of twelve iterations of four samples; iteration 10 reads 36 to 39."""

    def go(words, name, *options):
        out = folder / "runs" / name
        more = [f"--run_dir={out}", *LONGER, *SMALL, *REWIND, *options]
        done = run(APP, "spike", words, "train", f"--config={config}", *more)
        return done, out

    return go


@pytest.fixture(scope="module")
def rewound(train):
    done, out = train("36:40", "rewound")
    assert done.returncode == 0, done.stderr
    return done, out


def test_it_is_the_run_whose_data_never_had_them(rewound, train):
    done, out = rewound
    said = [line for line in done.stdout.splitlines() if line.startswith("rewind ")]
    assert len(said) == 1 and "back to iter_0000008, samples 32 to 39 are left out (1 of at most 2" in said[0]
    other, whole = train("32:40:without", "whole")
    assert other.returncode == 0 and "rewind " not in other.stdout
    assert differences(out, whole) == []
    record = skipped_samples.read(out / "checkpoints")
    assert [(r["first"], r["last"], r["iteration"], r["went_back_to"]) for r in record] == [(32, 40, 10, 8)]
    manifests = [read_manifest(path) for path in complete_checkpoints(out / "checkpoints")]
    assert [bool(m.state.get("left_out")) for m in manifests] == [False] * 4 + [True] * 2
    assert manifests[-1].state["left_out"] == record and manifests[-1].state["consumed_samples"] == 48
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [e["iteration"] for e in events if e["event"] == "rewind"] == [8]


@pytest.mark.parametrize("last", [6, 10])
def test_a_run_that_is_resumed_leaves_them_out_too(rewound, train, folder, last):
    """From a checkpoint that was saved after the rewind, whose manifest lists them, and from an earlier one."""
    _, out = rewound
    again = folder / "runs" / f"again{last}"
    shutil.copytree(out, again)
    for path in complete_checkpoints(again / "checkpoints"):
        if iteration_of(path) > last:
            shutil.rmtree(path)
    (again / "checkpoints" / "latest").write_text(f"iter_{last:07d}\n")
    done, _ = train("36:40", f"again{last}")
    assert done.returncode == 0, done.stderr
    assert "left out, as before: samples 32 to 39" in done.stdout and "rewind  " not in done.stdout
    assert differences(out, again) == []


def test_there_are_no_more_rewinds_than_allowed(train):
    done, out = train("36:56", "often", "--train.rewind_on_spike=1")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "far above" in line and "goes on" in line]
    assert done.stdout.count("\nrewind  ") == 1 and said and "All 1 rewinds are used up" in said[0]
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 12


def test_without_a_checkpoint_from_before_the_run_goes_on_and_says_so(train):
    done, out = train("36:40", "early", "--train.train_iters=10", "--checkpoint.save_interval=12")
    assert done.returncode == 0, done.stderr
    assert "iteration 10 had loss" in done.stdout
    assert "No checkpoint is from before, to go back to: training goes on." in done.stdout
    assert not (out / "checkpoints" / "left_out.json").exists()


def test_two_stages_go_back_together_twice_and_stop_on_a_signal_meanwhile(folder, config, forking_python):
    """The loss is the last stage's. The second spike is in an iteration done again; rank 1 is told to stop then."""
    stages = ["--model.pipeline_model_parallel_size=2", f"--config={config}", *LONGER, *SMALL, *REWIND]

    def train(words, name):
        out = folder / "runs" / name
        return torchrun(APP, "spike", words, "train", f"--run_dir={out}", *stages, python=forking_python), out

    stopped, out = train("36:44:told", "stages")
    assert stopped.returncode == 0, stopped.stderr
    said = [line for line in stopped.stdout.splitlines() if line.startswith("rewind ")]
    assert len(said) == 2, stopped.stdout
    assert "samples 32 to 39 are left out" in said[0] and "back to iter_0000008, samples 40 to 43" in said[1]
    assert complete_checkpoints(out / "checkpoints")[-1].name == "iter_0000009"
    resumed, _ = train("36:44", "stages")
    assert "left out, as before: samples 32 to 39, 40 to 43" in resumed.stdout, resumed.stderr
    whole, other = train("32:44:without", "stages_whole")
    assert (resumed.returncode, whole.returncode) == (
        0,
        0,
    ) and "rewind  " not in resumed.stdout + whole.stdout
    assert differences(out, other) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--checkpoint.save_interval=0"], "needs checkpoints to go back to: give checkpoint.save_int"),
        (["--model.fp8_guard=true"], "cannot take back the guard's moves"),
        (["--telemetry.every=2"], "would be recorded twice"),
        (["--train.rewind_on_spike=-1"], "train.rewind_on_spike=-1 must be"),
    ],
)
def test_what_does_not_go_with_it_is_refused(config, options, words):
    with pytest.raises(ValueError, match=words):
        run_config.parse([f"--config={config}", *REWIND, *options])
