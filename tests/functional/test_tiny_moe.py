"""The small DeepSeek-V3 that ships, cut short: it trains on two ranks, everything in FP8, and says what it is."""

import json

import pytest

from tests.support.command import lines, run_all, torchrun

CONFIG = "--config=tiny_moe_cpu"
CUT = [
    "--train.train_iters=12", "--train.seq_length=64", "--train.micro_batch_size=2", "--train.global_batch_size=4",
    "--train.eval_iters=1", "--optimizer.lr_warmup_iters=2", "--optimizer.lr=2e-3", "--model.num_layers=2",
    "--model.moe_layer_freq=[0,1]", "--model.hidden_size=128", "--checkpoint.save_interval=never",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(folder, config, forking_python):
    """A run's folder and what it printed; the data are a few words."""
    out = folder / "runs" / "moe"
    data = [
        f"--data.paths={[str(folder / 'text.txt')]}",
        "--data.split=80,20,0",
        f"--data.cache_dir={folder / 'cache'}",
    ]
    done = torchrun(
        "-m", "megatron_fp8", "train", CONFIG, *CUT, *data, f"--run_dir={out}", python=forking_python
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_it_learns_in_fp8(trained):
    out, said = trained
    metrics = lines(out / "metrics.jsonl")
    assert metrics[-1]["lm_loss"] < metrics[0]["lm_loss"] - 1.0
    assert metrics[-1]["mtp_loss"] < metrics[0]["mtp_loss"] - 0.5
    assert all(line["skipped"] == line["nonfinite"] == 0 for line in metrics)
    # In high precision the three products of the output layer, of the next token and of the one after it.
    assert {line["hp_gemms"] for line in metrics} == {6}
    assert "expert 2, data 2" in said and "FP8 e4m3, recipe blockwise" in said


def test_experts_of_both_ranks_are_counted(trained):
    """Three matrices of 128 x 256 an expert; of eight, a token meets two, in the second layer and in the one ahead."""
    out, said = trained
    counted = json.loads((out / "report.json").read_text())["parameters"]
    expert = 3 * 128 * 256
    assert counted["non_embedding"] - counted["active"] == 2 * 6 * expert
    assert f"of which a token meets {counted['active']:,}" in said


BAD = {
    "--model.num_moe_experts=7": "model.num_moe_experts=7, model.expert_model_parallel_size=2: every expert parallel",
    "--model.expert_model_parallel_size=4": "world size 1 does not divide by pipeline 1 x expert 4",
    "--model.moe_router_score_function=softmax": "only supports sigmoid score function",
    "--model.moe_router_dtype=bf16": "model.moe_router_dtype='bf16' must be one of 'fp32', 'fp64'",
}


def test_bad_input_is_one_line_before_training(folder):
    out = folder / "runs" / "bad"
    found = run_all(folder, [["train", CONFIG, option, f"--run_dir={out}"] for option in BAD], cwd=folder)
    assert not out.exists()
    for (code, said), words in zip(found, BAD.values(), strict=True):
        (error,) = (line for line in said.splitlines() if line.startswith("error: "))
        assert code == 2 and words in error, said
