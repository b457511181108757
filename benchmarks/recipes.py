"""Does FP8 learn what BF16 learns? Trains one config in BF16 and in every recipe, and tabulates the end.

    python -m benchmarks.recipes                      # examples/configs/tiny_gpt_cpu.yaml, two CPU ranks, all recipes
    python -m benchmarks.recipes --seeds 1234 1 2     # three seeds of weights and data order; each is judged
    python -m benchmarks.recipes --write              # also docs/recipes.md and docs/recipes.png
    python -m benchmarks.recipes --recipes mxfp8 -- --train.train_iters=50 --optimizer.lr_warmup_iters=5

FP8 is compared with the BF16 run of the same seed and data. Runs that are complete in --runs are read, not repeated. The
exit code is 1 if a recipe's validation loss is more than 1 % from BF16's with any seed, equals it in all bits, or BF16
did not beat the bigram entropy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gradient_formats
from benchmarks.common import table

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
LIMIT = 0.01


@dataclass(frozen=True)
class Result:
    """What one run left in its folder."""

    name: str
    seed: int
    losses: list[float]
    validation: float
    metrics: dict[str, Any]
    report: dict[str, Any]


def main() -> int:
    """Run, tabulate, and judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="examples/configs/tiny_gpt_cpu.yaml")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234], help="train.seed of each comparison")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "recipes", help="folder of the runs")
    parser.add_argument("--write", action="store_true", help="write docs/recipes.md and docs/recipes.png")
    parser.add_argument("overrides", nargs="*", help="further options of `megatron-fp8 train`, after --")
    wanted = parser.parse_args()
    results = [train(name, seed, wanted) for seed in wanted.seeds for name in ("bf16", *wanted.recipes)]
    rows, verdict = judge(results)
    text = table(
        ("run", "validation loss", *(f"from BF16, seed {seed}" for seed in wanted.seeds), "FP8 GEMMs a step"),
        rows,
    )
    entropy = results[0].report["bigram_entropy"]
    print(
        f"{text}\nbigram entropy of the data: {entropy:.4f} nats\n{verdict or 'every run is as it should be'}"
    )
    if wanted.write:
        write(results, text, entropy, wanted)
    return 1 if verdict else 0


def train(name: str, seed: int, wanted: argparse.Namespace) -> Result:
    """The result of one run, made unless it is there."""
    folder = wanted.runs / f"seed-{seed}" / name
    fp8 = (
        ["--model.fp8=null", "--model.first_last_layers_bf16=false"]
        if name == "bf16"
        else [f"--model.fp8_format={name}"]
    )
    if not (folder / "done").exists():
        print(f"training {name}, seed {seed} ...", flush=True)
        command = [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={wanted.ranks}",
            ),
            *(
                "-m",
                "megatron_fp8",
                "train",
                "--config",
                wanted.config,
                f"--run_dir={folder}",
                f"--train.seed={seed}",
                *fp8,
                *wanted.overrides,
            ),
        ]
        subprocess.run(command, cwd=ROOT, check=True)
        (folder / "done").touch()
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    validation = [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]
    report = json.loads((folder / "report.json").read_text())
    losses = [m["lm_loss"] for m in metrics]
    return Result(name, seed, losses, validation[-1]["validation_loss"], metrics[-1], report)


def judge(results: list[Result]) -> tuple[list[tuple[str, ...]], str]:
    """Table rows (the loss is the mean over seeds), and what is wrong ('' if nothing is)."""
    baseline = {result.seed: result for result in results if result.name == "bf16"}
    wrong: list[str] = []
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys(result.name for result in results):
        mine = [result for result in results if result.name == name]
        offs = []
        for result in mine:
            bf16 = baseline[result.seed]
            off = result.validation / bf16.validation - 1
            offs.append("" if result is bf16 else f"{off:+.2%}")
            if result is bf16 and bf16.validation >= bf16.report["bigram_entropy"]:
                wrong.append(f"BF16 did not learn more than bigrams (seed {result.seed})")
            if abs(off) > LIMIT:
                wrong.append(f"{name} is {off:+.2%} from BF16 (seed {result.seed})")
            if result is not bf16 and (off == 0 or not result.metrics["fp8_gemms"]):
                wrong.append(f"{name} did not run in FP8 (seed {result.seed})")
        loss = sum(result.validation for result in mine) / len(mine)
        rows.append((name, f"{loss:.4f}", *offs, str(mine[0].metrics["fp8_gemms"])))
    return rows, "; ".join(wrong)


def write(results: list[Result], text: str, entropy: float, wanted: argparse.Namespace) -> None:
    """docs/recipes.md and docs/recipes.png."""
    report = results[0].report
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items() if k in ("torch", "megatron-core"))
    iterations, seeds = len(results[0].losses), " ".join(map(str, wanted.seeds))
    (ROOT / "docs" / "recipes.md").write_text(
        f"# FP8 against BF16 on the small model, by recipe\n\n"
        f"`{wanted.config}`, {iterations} iterations, {wanted.ranks} CPU ranks (tensor and sequence parallel), the same"
        f" data for every run, and for each seed the same weights and order. Validation loss in nats a byte, the mean"
        f" over {len(wanted.seeds)} seed{'s' * (len(wanted.seeds) > 1)}; the bigram entropy of the data is"
        f" {entropy:.4f}, which a model must beat to have learned more than pairs of bytes. First and last layer in"
        f" BF16, as in the config. Each run has one recipe; one can also mix them, by layer, GEMM and operand"
        f" ([numerics.md](numerics.md#overrides-by-name)).\n\n"
        f"{text}\n\n![loss by iteration](recipes.png)\n\n"
        f"Made by `python -m benchmarks.recipes --write --seeds {seeds}` on {report['device']}, {versions}."
        f" Another run of the same command on the same machine gives the same losses to the last bit.\n\n"
        f"{gradient_formats.section()}"
    )
    plot([r for r in results if r.seed == wanted.seeds[0]], entropy, ROOT / "docs" / "recipes.png")


def plot(results: list[Result], entropy: float, path: Path) -> None:
    """Loss curves, and their differences from BF16's, smoothed over 15 iterations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (curves, differences) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    window = np.ones(15) / 15
    smooth = {r.name: np.convolve(r.losses, window, mode="valid") for r in results}
    steps = np.arange(15, 15 + len(smooth["bf16"]))
    for name, values in smooth.items():
        curves.plot(steps, values, label=name, lw=1.2)
        if name != "bf16":
            differences.plot(steps, 100 * (values / smooth["bf16"] - 1), label=name, lw=1.2)
    curves.axhline(entropy, color="gray", ls=":", label="bigram entropy")
    curves.set(xlabel="iteration", ylabel="training loss (nats a byte)")
    differences.axhspan(-1, 1, color="gray", alpha=0.15, lw=0)
    differences.axhline(0, color="gray", lw=0.8)
    differences.set(xlabel="iteration", ylabel="difference from BF16 (%)", ylim=(-3, 3))
    curves.legend(fontsize=8)
    differences.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    raise SystemExit(main())
