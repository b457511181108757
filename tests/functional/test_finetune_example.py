"""examples/finetune_llama.py, shorter: import, FP8 training, export, and transformers reading the result."""

from __future__ import annotations

import json
import subprocess

import transformers

from megatron_fp8.commands.export import main as export_main
from tests.support.command import ROOT, environment, lines


def test_the_example_imports_trains_exports_and_compares(tmp_path, forking_python):
    work = tmp_path / "work"
    text = tmp_path / "text.txt"
    text.write_text("all work and no play makes jack a dull boy\n" * 1000)
    done = subprocess.run(
        [
            forking_python, "examples/finetune_llama.py", f"--out={work}", "--iterations=12", "--seq-length=64",
            "--data", str(text), "--format=fp8-tensor", "--recipe=delayed", "--lr=3e-3",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = lines(work / "run" / "metrics.jsonl")
    assert [line["iteration"] for line in metrics] == list(range(1, 13))
    assert metrics[0]["fp8_gemms"] == 2 * 4 * 3 and metrics[0]["skipped"] == 0
    assert 5.5 < metrics[0]["lm_loss"] < 6.5 and metrics[-1]["lm_loss"] < metrics[0]["lm_loss"] - 1.5
    for said in (
        "the checkpoint holds weights alone: masters start from them",
        "delayed scaling starts here: scales of 8 weights",
        "14 linears in FP8 (fp8-tensor)",
    ):
        assert said in done.stdout, said
    assert "order of samples" not in done.stdout and "another parallel layout" not in done.stdout
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert report["loss"]["bf16"] < 5.5 and abs(report["loss"]["fp8"] - report["loss"]["bf16"]) < 0.1
    # two layers of 720,896 weights lose a byte each; two vocabularies of 257 x 256 and the norms stay
    saved = report["bytes"]["bf16"] - report["bytes"]["fp8"]
    assert 0.98 < saved / sum(path_weights(work / "fp8")) < 1.0
    config = json.loads((work / "fp8" / "config.json").read_text())
    assert config["max_position_embeddings"] == 512 and config["eos_token_id"] == 256
    assert (work / "fp8" / "tokenizer.json").read_bytes() == (
        work / "random-llama" / "tokenizer.json"
    ).read_bytes()

    # Without the directory it came from: positions, special tokens and the tokenizer are the run's.
    assert export_main([str(work / "run"), str(tmp_path / "own")]) == 0
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert (config["max_position_embeddings"], config["eos_token_id"], config["vocab_size"]) == (64, 256, 257)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "own")
    assert (
        tokenizer.eos_token == "<|endoftext|>"
        and tokenizer.decode(tokenizer("dull\n")["input_ids"]) == "dull\n"
    )


def path_weights(folder) -> list[int]:
    """Sizes of the tensors that are FP8."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        names = [name for name in handle.keys() if f"{name.rpartition('.')[0]}.weight_scale" in handle.keys()]  # noqa: SIM118
        return [handle.get_tensor(name).numel() for name in names if name.endswith(".weight")]
