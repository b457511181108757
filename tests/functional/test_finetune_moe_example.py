"""examples/finetune_moe.py, shorter: import of a DeepSeek-V3, FP8 training, export, and transformers reading it."""

import json
import subprocess

from tests.support.command import ROOT, environment, lines


def test_the_example_imports_trains_exports_and_compares(tmp_path, forking_python):
    work = tmp_path / "work"
    text = tmp_path / "text.txt"
    text.write_text("all work and no play makes jack a dull boy\n" * 500)
    done = subprocess.run(
        [
            forking_python, "examples/finetune_moe.py", f"--out={work}", "--iterations=6", "--seq-length=64",
            "--data", str(text), "--lr=3e-3",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = lines(work / "run" / "metrics.jsonl")
    assert [line["iteration"] for line in metrics] == list(range(1, 7))
    # 5 linears of attention in both layers, 2 of the dense MLP, of 4 experts and of the shared one
    assert metrics[0]["fp8_gemms"] == 3 * (2 * 5 + 2 + 4 * 2 + 2) and metrics[0]["skipped"] == 0
    assert 5.3 < metrics[0]["lm_loss"] < 6.3 and metrics[-1]["lm_loss"] < metrics[0]["lm_loss"] - 0.5
    assert "DeepseekV3ForCausalLM, 24 linears in FP8 (fp8-block), 4 kept in bfloat16" in done.stdout
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert abs(report["loss"]["fp8"] - report["loss"]["bf16"]) < 0.1
    assert report["loss"]["bf16"] < metrics[0]["lm_loss"]
