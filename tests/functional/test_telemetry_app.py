"""`megatron-fp8 train` with telemetry: what is written, a resumed run, refusals."""

import pytest

from megatron_fp8.telemetry.telemetry import scalars
from tests.support.command import ROOT, lines, run, run_all

TINY = ROOT / "examples" / "configs" / "tiny_gpt_cpu.yaml"
STAND_IN = f"{ROOT}:{ROOT / 'tests' / 'support' / 'wandb_standin'}"
WATCHED = ["--telemetry.every=1", "--telemetry.sites=*.linear_fc1", "--telemetry.what_if=mxfp8"]


@pytest.fixture(scope="module")
def runs(folder, config):
    """An uninterrupted run, and one that stopped after two iterations and went on, with what a killed run leaves."""
    common = [f"--config={config}", *WATCHED, "--optimizer.lr_decay_iters=4", "--telemetry.wandb=true"]

    def train(name, *more):
        out = folder / name
        done = run(
            "-m", "megatron_fp8", "train", *common, f"--run_dir={out}", *more, PYTHONPATH=STAND_IN
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return out

    whole = train("whole")
    resumed = train("resumed", "--train.train_iters=2", "--checkpoint.save_interval=2")
    with (resumed / "telemetry.jsonl").open("a") as file:
        file.write('{"iteration": 3, "site": "decoder.layers.0.mlp.linear_fc1", "tensor": "input"}\n{"iterat')
    train("resumed", "--checkpoint.save_interval=2")
    return whole, resumed


def test_a_record_for_each_iteration_site_and_tensor(runs):
    whole, _ = runs
    records = lines(whole / "telemetry.jsonl")
    tensors = ("input", "weight", "grad_output", "output", "dgrad", "wgrad")
    sites = [f"decoder.layers.{layer}.mlp.linear_fc1" for layer in range(4)]
    assert [(r["iteration"], r["site"], r["tensor"]) for r in records] == [
        (iteration, site, tensor) for iteration in range(1, 5) for site in sites for tensor in tensors
    ]
    for record in records:
        assert list(record)[:3] == ["iteration", "site", "tensor"] and record["l1_norm"] > 0
        fp8 = record["site"].split(".")[2] == "2"  # the others stay in BF16
        operand = record["tensor"] in tensors[:3]
        assert ("underflows%" in record) == (fp8 and operand)
        assert ("mxfp8_underflows%" in record) == operand


def test_a_resumed_run_goes_on_and_repeats_nothing(runs):
    whole, resumed = runs
    assert lines(resumed / "telemetry.jsonl") == lines(whole / "telemetry.jsonl")


def test_tensorboard_and_wandb_have_every_statistic(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    whole, resumed = runs
    wanted = scalars([r for r in lines(whole / "telemetry.jsonl") if r["iteration"] == 4])
    events = EventAccumulator(str(whole / "tensorboard"))
    events.Reload()
    assert wanted.keys() <= set(events.Tags()["scalars"])
    tag = "telemetry/decoder.layers.2.mlp.linear_fc1/grad_output/underflows%"
    assert [event.step for event in events.Scalars(tag)] == [1, 2, 3, 4]
    calls = lines(resumed / "wandb-calls.jsonl")
    assert [(c["call"], c.get("step")) for c in calls] == [
        *[("init", None), ("log", 1), ("log", 2), ("finish", None)],
        *[("init", None), ("log", 3), ("log", 4), ("finish", None)],
    ]
    assert calls[0]["id"] == calls[4]["id"] and calls[-2]["values"] == wanted


REFUSED = {
    "--telemetry.every=-1": "telemetry.every=-1 must be a whole number",
    "--telemetry.statistics=underflow%": "Did you mean 'underflows%'?",
    "--telemetry.tensors=inputs": "telemetry.tensors=['inputs'] must be a list of items, each one of",
    "--telemetry.what_if=fp4": "telemetry what_if: 'fp4' is none of tensorwise",
    "--telemetry.windows=[[9, 3]]": "telemetry windows: (9, 3) must be (first, last)",
    "--telemetry.te_config=nowhere.yaml": "telemetry.te_config='nowhere.yaml' cannot be read",
    f"--telemetry.te_config={TINY}": "tiny_gpt_cpu.yaml': section model: enabled=None must be True or False",
    "--telemetry.wandb=true": "telemetry wandb=True needs Weights & Biases, which is not installed: pip install wandb",
    "--telemetry.every=0": "has no effect without telemetry.every: give telemetry.every=10",
    "--telemetry.sites=*.fc9": "telemetry sites: '*.fc9' matches no GEMM site",  # the last, since it builds the model
}


def contents(out):
    """Of a run's folder, but for what holds it."""
    return {
        str(path): path.read_bytes() for path in out.rglob("*") if path.is_file() and "lock" not in path.name
    }


def test_bad_input_is_one_line_and_changes_nothing(folder, config, runs):
    """Two starts into a run's folder, one of which would go on and one begin anew, are refused with the model built."""
    common = ["train", f"--config={config}", f"--run_dir={folder / 'bad'}", "--telemetry.every=2"]
    cases = [[*common, "--telemetry.sites=*.linear_fc1", "--dry-run", option] for option in REFUSED]
    for resume in ("auto", "never"):
        into = [f"--run_dir={runs[1]}", f"--resume={resume}", "--train.train_iters=6"]
        cases.append([*common, *into, "--telemetry.sites=*.fc9"])
    before = contents(runs[1])
    found = run_all(folder, cases)
    assert contents(runs[1]) == before
    expectations = [*REFUSED.values(), *["'*.fc9' matches no GEMM site"] * 2]
    for (code, text), expected in zip(found, expectations, strict=True):
        assert code == 2 and expected in text and len(text.splitlines()) == 1, text
