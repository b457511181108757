"""The training app as people run it: subprocesses, torchrun, SLURM's variables, files, exit codes."""

import json
import subprocess

import pytest
import yaml

from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.train.config.run_config import known_keys
from tests.support.command import APP, MEASURED, TWO_RANKS, environment, lines, run, run_all, torchrun
from tests.support.host_syncs import ON_CPUS
from tests.support.size_table import make_table

FIELDS = [
    "iteration", "lm_loss", "grad_norm", "learning_rate", "tokens", "tokens_per_s", "mfu", "skipped",
    "loss_scale", "nonfinite", "fp8_gemms", "hp_gemms", "amax_collectives", "peak_memory",
    "mtp_loss",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(folder, config, forking_python):
    """A watched run under torchrun, TP=2 with sequence parallelism, delayed scaling."""
    out = folder / "runs" / "first"
    watched = [APP, "watch", folder / "calls.json", "train", f"--config={config}", f"--run_dir={out}"]
    done = torchrun(*watched, *TWO_RANKS, python=forking_python)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_the_step_is_megatrons(trained, folder):
    counts = json.loads((folder / "calls.json").read_text())
    assert counts["DistributedDataParallel"] == 1
    assert counts["get_megatron_optimizer"] == 1
    assert counts["get_forward_backward_func"] == 1
    samples = 4 * 4 + 2 * 4  # four steps and two validations of four sequences
    assert counts["__getitem__"] == samples


def test_metrics_have_one_object_per_iteration_with_the_promised_fields(trained):
    out, _ = trained
    metrics = lines(out / "metrics.jsonl")
    assert [list(line) for line in metrics] == [FIELDS] * 4
    assert [line["iteration"] for line in metrics] == [1, 2, 3, 4]
    assert [line["tokens"] for line in metrics] == [256, 512, 768, 1024]
    for line in metrics:
        assert line["skipped"] == line["nonfinite"] == 0 and line["mfu"] is None
        assert line["grad_norm"] > 0 and line["tokens_per_s"] > 0 and line["peak_memory"] > 1 << 20
        # one FP8 layer: 4 linears x 3 GEMMs x 2 micro-batches; the other three, and the output projection
        assert (line["fp8_gemms"], line["hp_gemms"], line["amax_collectives"]) == (24, 78, 1)
    assert metrics[-1]["lm_loss"] < metrics[0]["lm_loss"] - 0.5
    assert metrics[0]["learning_rate"] == 0.01 > metrics[-1]["learning_rate"]
    validations = lines(out / "validation.jsonl")
    assert [line["iteration"] for line in validations] == [2, 4]
    assert validations[1]["validation_loss"] < validations[0]["validation_loss"]
    assert list((out / "tensorboard").glob("events*"))


def test_the_report_lists_every_gemm_site(trained):
    out, said = trained
    report = json.loads((out / "report.json").read_text())
    sites = report["sites"]
    precisions = [(site["layer"], site["precision"]) for site in sites if site["layer"] is not None]
    assert [layer for layer, _ in precisions] == [layer for layer in range(4) for _ in range(4)]
    assert {layer for layer, precision in precisions if precision == "fp8"} == {2}
    assert all(site["reason"] for site in sites)
    assert {site["backend"] for site in sites if site["precision"] == "fp8"} == {"emulated"}
    assert report["parallel"]["tensor"] == report["parallel"]["world_size"] == 2
    h, ffn, vocab = 64, 128, 512
    layer = h * (h + 2 * 32) + h * h + 3 * h * ffn + 2 * h
    assert report["parameters"] == {"total": 4 * layer + h + 2 * vocab * h, "non_embedding": 4 * layer + h}
    for fact in ("CPU", "megatron-core", "gloo", f"{4 * layer + h + 2 * vocab * h:,}", "delayed", "bigram"):
        assert fact in said


def test_the_whole_config_is_written(trained):
    out, _ = trained
    saved = yaml.safe_load((out / "config.yaml").read_text())
    assert {f"model.{key}" for key in saved["model"]} <= set(known_keys())
    assert saved["model"]["fp8_recipe"] == "delayed" and saved["train"]["seed"] == 1234


def test_report_prints_a_run(trained):
    out, _ = trained
    shown = run("-m", "megatron_fp8", "report", out)
    assert shown.returncode == 0, shown.stderr
    for fact in ("layer 2", "fp8", "delayed", "4 iterations", "0 steps skipped", "validation"):
        assert fact in shown.stdout


def test_the_same_config_gives_the_same_losses_to_the_bit_under_slurm(trained, folder, forking_python, port):
    """The same run again, launched as srun does it, from the first run's own config.yaml."""
    first, _ = trained
    second = folder / "runs" / "second"
    command = [forking_python, "-m", "megatron_fp8", "train", f"--config={first / 'config.yaml'}"]
    ranks = [
        subprocess.Popen(
            [*command, f"--run_dir={second}"],
            env=environment(
                SLURM_PROCID=str(rank), SLURM_NTASKS="2", SLURM_LOCALID=str(rank), SLURM_NODELIST="127.0.0.1",
                SLURM_TASKS_PER_NODE="2", MASTER_PORT=str(port),
            ),
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert [rank.wait(timeout=150) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    again = lines(second / "metrics.jsonl")
    for one, other in zip(lines(first / "metrics.jsonl"), again, strict=True):
        for name in set(FIELDS) - MEASURED:
            assert one[name] == other[name], (name, one, other)
    assert lines(first / "validation.jsonl") == lines(second / "validation.jsonl")


def test_a_step_that_is_not_finite_is_skipped_counted_and_survived(folder, config):
    out = folder / "runs" / "poisoned"
    done = run(APP, "poison", 3, "train", f"--config={config}", f"--run_dir={out}")
    assert done.returncode == 0, done.stderr
    metrics = lines(out / "metrics.jsonl")
    assert [line["skipped"] for line in metrics] == [0, 1, 0, 0]
    assert metrics[1]["lm_loss"] is None and metrics[1]["grad_norm"] is None
    assert [line["nonfinite"] > 0 for line in metrics] == [False, True, False, False]
    assert metrics[1]["learning_rate"] == metrics[2]["learning_rate"]  # the schedule waits
    assert lines(out / "validation.jsonl")[1]["validation_loss"] < metrics[0]["lm_loss"] - 0.5
    assert "skipped 1" in done.stdout


def test_the_host_of_a_gpu_would_wait_three_times_an_iteration(folder, config):
    """As docs/performance.md lists them; nothing in torch's own code looks for what is where, or compares."""
    path = folder / "waits.json"
    done = run(APP, "waits", path, "train", f"--config={config}", f"--run_dir={folder / 'runs' / 'waits'}")
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert len(found) == 2
    for places, hidden in found:
        assert [place for place in places if place not in ON_CPUS] == [
            "fp8_state.py _read tolist",
            "optimizer.py _unscale_main_grads_and_check_for_nan item",
            "clip_grads.py get_grad_norm_fp32 item",
        ]
        assert not [read for read in hidden if read.startswith(("aten::nonzero", "aten::equal"))]


def test_dry_run_builds_and_checks_but_trains_nothing(folder, config):
    out = folder / "runs" / "dry"
    more = ["--model.fp8_overrides={'*.linear_proj': bf16}", "--model.fp8_param=true", "--dry-run"]
    done = run("-m", "megatron_fp8", "train", f"--config={config}", f"--run_dir={out}", *more)
    assert done.returncode == 0, done.stderr
    assert "fp8_overrides '*.linear_proj'" in done.stdout and "(3 sites)" in done.stdout
    assert "ln(384) = 5.9506" in done.stdout and "[192, 64]" not in done.stdout.split("shapes")[0]
    assert "linear_qkv.weight" in done.stdout and "precision" in done.stdout
    weights = [line.split() for line in done.stdout.splitlines() if "layers.2." in line and "weight" in line]
    kinds = {line[0].rpartition("layers.2.")[2]: line[-1] for line in weights if "norm" not in line[0]}
    assert kinds == {
        "self_attention.linear_qkv.weight": "torch.float8_e4m3fn",
        "self_attention.linear_proj.weight": "torch.bfloat16",
        "mlp.linear_fc1.weight": "torch.float8_e4m3fn",
        "mlp.linear_fc2.weight": "torch.float8_e4m3fn",
    }
    assert not out.exists()


def test_a_run_in_fp4_says_so(folder, config):
    """In the plan, the report, the phases and the checkpoint's entry; what was asked of FP8 beside it is named."""
    out = folder / "runs" / "fp4"
    fp4 = ["--model.fp8=null", "--model.fp4=e2m1", "--model.fp8_recipe=null", "--train.train_iters=3"]
    more = [
        "--model.fp8_high_precision_warmup=0.3",
        "--model.fp8_overrides={'*.layers.2.mlp.linear_fc1:dgrad': mxfp8}",
    ]
    done = run("-m", "megatron_fp8", "train", f"--config={config}", f"--run_dir={out}", *fp4, *more)
    assert done.returncode == 0, done.stderr
    assert (
        "FP4 e2m1, recipe nvfp4" in done.stdout
        and "fp4, nvfp4, emulated: fp4 recipe of the config" in done.stdout
    )
    assert "BF16 in iterations 1-1 (warm-up), FP4 in iterations 2-3" in done.stdout
    assert "megatron_fp8: FP4 from iteration 2 on, the warm-up in BF16 is over" in done.stdout
    report = json.loads((out / "report.json").read_text())
    precision = report["precision"]
    assert (precision["fp8"], precision["fp4"], precision["fp4_recipe"]) == (None, "e2m1", "nvfp4")
    gemms = {site["name"]: site["gemms"] for site in report["sites"] if site["precision"] == "fp4"}
    assert len(gemms) == 4 and set(gemms["decoder.layers.2.mlp.linear_fc2"].values()) == {"fp4"}
    assert gemms["decoder.layers.2.mlp.linear_fc1"] == {"fprop": "fp4", "dgrad": "fp8", "wgrad": "fp4"}
    assert [line["fp8_gemms"] for line in lines(out / "metrics.jsonl")] == [0, 24, 24]
    told = run("-m", "megatron_fp8", "inspect", out)
    assert "FP4 e2m1, nvfp4" in told.stdout, told.stdout + told.stderr


# ------------------------------------------------------------------------------------------ bad input


def test_the_command_ends_with_2_and_one_line(config):
    said = run("-m", "megatron_fp8", "train", f"--config={config}", "--model.fp8=hybird")
    assert said.returncode == 2 and said.stdout == ""
    assert said.stderr.splitlines() == [
        "error: model.fp8='hybird' must be one of 'e4m3', 'hybrid', or null: change it, or leave it None. Did you mean"
        " 'hybrid'?"
    ]


def test_every_bad_input_is_named_before_training(folder, config):
    short = folder / "short.txt"
    short.write_text("few words")
    # Of two token counts: the run's own, 2 x 64, must decide, and nothing as small was measured.
    table = make_table(folder / "table.json", {(8, 8, 4096): 0.5, (8, 8, 8192): 0.5}, DelayedScaling())
    cases = {
        "--model.num_layers_at_start_in_bf16=5": "num_layers_at_start_in_bf16=5",
        "--model.num_layers_at_start_in_bf16=3": "num_layers_at_end_in_bf16=1 leave none of num_layers=4 in FP8",
        "--model.fp8_overrides={'*': bf16}": "leave none of 16 GEMM sites in FP8 (fp8_overrides '*'",
        "--model.vocab_size=128256": "model.vocab_size=128256",
        "--model.fp8_format=custom --model.fp8_quantizer_factory=os.getcwd": "os.getcwd",
        "--model.fp8_backend=native": "native",
        f"--model.fp8_size_filter={table}": "at 128 tokens was not measured, nor any as small in every dimension",
        "--model.fp8_size_filter=no.json": "fp8_size_filter='no.json' is not a table of measured GEMMs: it cannot be",
        "--model.fp8_overrides={'*.no_such_layer': bf16}": "matches no GEMM site; the sites are decoder.layers.0.",
        "--model.tensor_model_parallel_size=2": "world size 1 does not divide by tensor 2",
        "--train.global_batch_size=3": "train.global_batch_size=3",
        "--train.seq_length=65 --model.context_parallel_size=1 --data.split=1": "data.split='1'",
        "--checkpoint.save_interval=-5": "checkpoint.save_interval=-5",
        "--resume=runs/other": "'runs/other' is not a checkpoint of megatron_fp8: there is no such folder",
        "--data.paths=['nowhere.txt']": "nowhere.txt",
        f"--data.paths=['{short}']": "leaves 10 tokens",
        "--run_dir=/proc/nowhere": "/proc/nowhere",
        "--config=nowhere.yaml": "nowhere.yaml",
    }
    base = ["train", f"--config={config}", f"--run_dir={folder / 'runs' / 'bad'}"]
    commands = [[*base, *_split(case)] for case in cases]
    others = {f"report {folder / 'nothing'}": "nothing", "doctor x": "is no option of doctor"}
    commands += [case.split() for case in others]
    cases |= others
    results = run_all(folder, commands)
    for (case, words), (code, said) in zip(cases.items(), results, strict=True):
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert code == 2 and len(errors) == 1 and words in errors[0], (case, code, said)
        assert "Traceback" not in said, case
    assert not (folder / "runs" / "bad").exists()


def _split(case):
    """Options of one case; a value may hold spaces inside braces."""
    return ["--" + part.strip() for part in case.split("--") if part]
