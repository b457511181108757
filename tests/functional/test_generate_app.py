"""`megatron-fp8 calibrate` and `generate` on a run that was trained here: text, files, and every kind of bad input."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from megatron_fp8.files.checkpoint import latest_checkpoint
from megatron_fp8.inference.calibration import load_calibration
from tests.support.command import MODEL, run_each, torchrun
from tests.support.command import run as command_run
from tests.support.manifests import edit

FIELDS = {**MODEL, "num_layers": 2, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0}
FIELDS |= {"fp8_format": "tensorwise", "hidden_dropout": 0.0}
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16, "rope_type": "rope", "mtp_num_layers": 1, "fp8_format": "rowwise", "num_moe_experts": 2,
    "moe_ffn_hidden_size": 64, "moe_router_topk": 2, "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall",
    "moe_fp8_dispatch": True, "add_bias_linear": False,
}  # fmt: skip
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
CONTEXT = 32
Heard = dict[str, tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("generation")


@pytest.fixture(scope="module")
def heard(folder) -> Heard:
    """Train on the alphabet until the model knows it, then everything below."""
    (folder / "text.txt").write_text(ALPHABET * 400)
    (folder / "short.txt").write_text("ham")
    content = {
        "model": FIELDS,
        "train": {
            "train_iters": 30, "micro_batch_size": 8, "global_batch_size": 8, "seq_length": CONTEXT,
            "eval_interval": 0, "eval_iters": 0, "threads": 1,
        },
        "optimizer": {"lr": 0.01, "lr_warmup_iters": 2},
        "data": {"paths": [str(folder / "text.txt")], "split": "1,0,0", "cache_dir": str(folder / "cache")},
        "checkpoint": {"save_interval": 30},
    }  # fmt: skip
    config = folder / "small.yaml"
    config.write_text(yaml.safe_dump(content))
    other = folder / "other.yaml"
    other.write_text(yaml.safe_dump({**content, "model": {**FIELDS, "hidden_size": 32, "kv_channels": 16}}))
    latent = folder / "latent.yaml"
    fields = {key: value for key, value in FIELDS.items() if key != "num_query_groups"} | LATENT
    latent.write_text(yaml.safe_dump({**content, "model": fields}))
    run_dir = folder / "run"
    generate = ["generate", run_dir, "--prompt", "abcde"]
    few = ["--max-new-tokens", "8"]
    greedy = [*generate, "--temperature", "0"]
    static = [*greedy, "--activations", "static"]
    of_latent = ["generate", folder / "latent", *greedy[2:]]
    first = run_each(
        folder,
        {
            "train": ["train", f"--config={config}", f"--run_dir={run_dir}"],
            "no calibration": static,
            "calibrate": ["calibrate", run_dir, "--batches", "2"],
            "percentile": ["calibrate", run_dir, "--data", folder / "text.txt", "--percentile", "99.9",
                           "--batches", "1", "--batch-size", "4", "--out", folder / "finer"],
            "greedy": greedy,
            "bf16": [*greedy, "--recipe", "bf16"],
            "mxfp8": [*greedy, "--recipe", "mxfp8"],
            "static": static,
            "static channels": [*static, "--recipe", "rowwise", "--calibration", folder / "finer"],
            "delayed": [*greedy, "--recipe", "delayed"],
            "seed 1": [*generate, "--seed", "1", "--temperature", "3", "--top-k", "40", *few],
            "seed 1 again": [*generate, "--seed", "1", "--temperature", "3", "--top-k", "40", *few],
            "seed 2": [*generate, "--seed", "2", "--temperature", "3", "--top-k", "40", *few],
            "hot": [*generate, "--temperature", "50", "--max-new-tokens", "20"],
            "a document": ["generate", run_dir, "--prompt", "", "--max-new-tokens", "3"],
            "uneven stages": [*greedy, "--model.num_layers_in_first_pipeline_stage=1"],
            "options": [*greedy, "--model.fp8_pow2_scales=true", "--fp8", "e4m3"],
            "latent train": ["train", f"--config={latent}", f"--run_dir={folder / 'latent'}"],
            "latent": of_latent,
            "latent, tensorwise": [*of_latent, "--recipe", "tensorwise"],  # whose codes cannot be sent in training
        },
    )  # fmt: skip
    damaged, unsaid = folder / "damaged", folder / "unsaid"
    for copy in (damaged, unsaid):
        shutil.copytree(run_dir, copy)
    tensors = damaged / "calibration" / "calibration.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    edit(latest_checkpoint(unsaid / "checkpoints"), lambda content: content["facts"].pop("run"))
    calibrate = ["calibrate", run_dir]
    return first | run_each(
        folder,
        {
            "long prompt": ["generate", run_dir, "--prompt", "x" * CONTEXT],
            "no room": [*generate, "--max-new-tokens", CONTEXT - 4],
            "damaged calibration": ["generate", damaged, "--prompt", "a", "--activations", "static"],
            "static bf16": [*static, "--recipe", "bf16"],
            "calibration unused": [*greedy, "--calibration", folder / "finer"],
            "another shape": [*greedy, "--config", other],
            "no config": ["generate", unsaid, "--prompt", "a"],
            "its config given": [
                "generate", unsaid, "--prompt", "abcde", "--temperature", "0", "--config", config,
            ],
            "no batches": [*calibrate, "--batches", "0"],
            "too little text": [*calibrate, "--data", folder / "short.txt"],
            "calibrate bf16": [*calibrate, "--recipe", "bf16"],
            "unwritable": [*calibrate, "--batches", "1", "--out", folder / "text.txt" / "inside"],
        },
    )  # fmt: skip


DONE = ("train", "calibrate", "percentile", "greedy", "bf16", "mxfp8", "static", "static channels", "delayed", "hot",
        "seed 1", "a document", "uneven stages", "options", "latent train", "latent", "latent, tensorwise",
        "its config given")  # fmt: skip


@pytest.mark.parametrize("name", DONE)
def test_it_ends_well(heard, name):
    code, said, _ = heard[name]
    assert code == 0, said


def test_the_text_is_the_prompt_and_what_follows_it(heard):
    for name in (
        "greedy",
        "bf16",
        "mxfp8",
        "static",
        "static channels",
        "delayed",
        "uneven stages",
        "options",
        "latent",
        "latent, tensorwise",
        "its config given",
    ):
        assert heard[name][2] == f"{(ALPHABET * 2)[:CONTEXT]}\n", name


def test_ranks_share_a_prompt_from_stdin(heard, folder, forking_python):
    """The launcher gives every rank the same pipe, which only one of them may empty."""
    command = ["-m", "megatron_fp8", "generate", folder / "run", "--prompt", "-", "--temperature", "0"]
    done = torchrun(*command, python=forking_python, input="abcde")
    assert done.returncode == 0, done.stderr
    assert done.stdout == heard["greedy"][2]


def test_a_stdout_of_few_characters_shows_the_others_by_number(heard, folder):
    command = ["-m", "megatron_fp8", "generate", folder / "run", "--prompt", "é", "--max-new-tokens", 1]
    done = command_run(*command, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.startswith("\\xe9"), done.stderr


def test_a_seed_decides_the_draws(heard):
    assert heard["seed 1"][2] == heard["seed 1 again"][2] != heard["seed 2"][2]
    hot = heard["hot"][2].removeprefix("abcde")
    assert not set(hot) <= set(ALPHABET), "a temperature of 50 draws nearly any byte"


def test_what_ran_is_said_and_counted(heard):
    said = heard["static"][1]
    assert (
        "iteration 30" in said
        and "tensorwise: weights e4m3 per tensor, activations static, one scale per tensor" in said
    )
    weights = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128  # one of two layers is FP8
    assert f"4 linears in FP8: {2 * weights:,} -> {weights + 16:,} bytes; 4 stay as they are" in said
    assert "27 tokens in" in said
    assert "mxfp8: weights e4m3 per 1x32, activations dynamic, one scale per 1x32" in heard["mxfp8"][1]
    assert "rowwise: weights e4m3 per row, activations static" in heard["static channels"][1]
    assert "bfloat16, model" in heard["bf16"][1] and "FP8" not in heard["bf16"][1]


def test_a_calibration_is_written_beside_the_run(heard, folder):
    calibration, finer = load_calibration(folder / "run" / "calibration"), load_calibration(folder / "finer")
    sites = [f"decoder.layers.{n}.{site}" for n in range(2) for site in (
        "self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")]  # fmt: skip
    cached = {
        f"decoder.layers.{n}.self_attention.core_attention.{role}"
        for n in range(2)
        for role in ("key", "value")
    }
    inside = {f"{site}.{role}" for site in sites for role in ("input", "weight")}
    assert set(calibration.ranges) == inside | cached
    assert all(name in heard["calibrate"][2] for name in cached)
    facts = calibration.facts
    assert (facts["method"], facts["batches"], facts["tokens"], facts["iteration"]) == (
        "max",
        2,
        2 * 8 * CONTEXT,
        30,
    )
    assert finer.facts["method"] == "percentile 99.9" and finer.facts["tokens"] == 4 * CONTEXT
    for site in sites:
        assert site in heard["calibrate"][2]
        assert 0 < finer.ranges[f"{site}.input"].amax < calibration.ranges[f"{site}.input"].amax * 1.5


BAD = {
    "no calibration": "there is no calibration in",
    "long prompt": "the prompt has 32 tokens and the model's context is 32",
    "no room": "--max-new-tokens 28: after a prompt of 5 tokens the context of 32 has room for 27",
    "damaged calibration": "is damaged (calibration.safetensors is not what was written",
    "static bf16": "--activations static needs FP8",
    "calibration unused": "--calibration is for --activations static",
    "another shape": "is of another model: ",
    "no config": "has no config of its run: give it with --config=FILE",
    "no batches": "--batches 0 must be at least 1",
    "too little text": "a sequence has 32: give more text",
    "calibrate bf16": "--recipe bf16 has no scales to calibrate",
    "unwritable": "cannot be written",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(heard, name):
    code, said, printed = heard[name]
    assert code == 2, said
    errors = [line for line in said.splitlines() if not line.startswith(("checkpoint  ", "precision  "))]
    assert len(errors) == 1 and errors[0].startswith("error: ") and BAD[name] in errors[0], said
    assert printed == ""
