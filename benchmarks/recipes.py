"""Does FP8 learn what BF16 learns? `megatron-fp8 compare` of every recipe, judged, and written into docs.

    python -m benchmarks.recipes                      # examples/configs/tiny_gpt_cpu.yaml, all recipes
    python -m benchmarks.recipes --seeds 1234,1,2     # three seeds of weights and data order; each is judged
    python -m benchmarks.recipes --write              # also docs/recipes.md, docs/recipes.png and results/recipes.json
    python -m benchmarks.recipes --recipes mxfp8 --train.train_iters=50 --optimizer.lr_warmup_iters=5

Runs that are complete in --out are read, not repeated. The exit code is 1 if a recipe's loss is more than 1 % from BF16's
with any seed, equals it in all bits, or BF16 did not beat the bigram entropy.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks import gradient_formats
from benchmarks.common import RESULTS, describe, environment
from megatron_fp8.commands.main import main as megatron_fp8
from megatron_fp8.study.compare.output import as_table
from megatron_fp8.study.compare.plan import BASELINE

ROOT = Path(__file__).resolve().parent.parent
RECIPES = "delayed,tensorwise,rowwise,blockwise,mxfp8"
LIMIT = 0.01


def main() -> int:
    """Compare, judge, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="examples/configs/tiny_gpt_cpu.yaml")
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument("--seeds", default="1234,1", help="as of megatron-fp8 compare (default %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "recipes", help="folder of the comparison"
    )
    parser.add_argument("--write", action="store_true", help="write docs/recipes.* and results/recipes.json")
    wanted, overrides = parser.parse_known_args()
    options = [f"--config={wanted.config}", f"--recipes={wanted.recipes}", f"--seeds={wanted.seeds}"]
    code = megatron_fp8(["compare", *options, f"--out={wanted.out}", *overrides])
    if code:
        return code
    content = json.loads((wanted.out / "compare.json").read_text())
    wrong = judge(content)
    print(wrong or "every run is as it should be")
    if wanted.write:
        write(content, wanted.out)
    return 1 if wrong else 0


def judge(content: dict[str, Any]) -> str:
    """What is wrong with a comparison ('' if nothing is)."""
    wrong = []
    baseline = {run["seed"]: run for run in content["runs"] if run["recipe"] == BASELINE}
    for run in content["runs"]:
        bf16 = baseline[run["seed"]]
        off = run["loss"] / bf16["loss"] - 1
        if run is bf16:
            if run["loss"] >= content["bigram_entropy"]:
                wrong.append(f"BF16 did not learn more than bigrams (seed {run['seed']})")
        elif off == 0 or not run["fp8_gemms"]:
            wrong.append(f"{run['recipe']} did not run in FP8 (seed {run['seed']})")
        elif abs(off) > LIMIT:
            wrong.append(f"{run['recipe']} is {off:+.2%} from BF16 (seed {run['seed']})")
    return "; ".join(wrong)


def write(content: dict[str, Any], out: Path) -> None:
    """docs/recipes.md, docs/recipes.png and benchmarks/results/recipes.json, which has the numbers of both."""
    seeds = ",".join(map(str, content["seeds"]))
    record = {**environment(["megatron-core"]), "threads": 1, "measured": "wall time, one thread a rank"}
    (ROOT / "docs" / "recipes.md").write_text(
        f"# FP8 against BF16 on the small model, by recipe\n\n"
        f"`{content['config']}`, {content['iterations']} iterations, {content['ranks']} CPU ranks (tensor and"
        f" sequence parallel), the same data for every run, and for each seed the same weights and order."
        f" Validation loss in nats a byte; the bigram entropy of the data is {content['bigram_entropy']:.4f},"
        f" which a model must beat to have learned more than pairs of bytes. First and last layer in BF16, as in"
        f" the config. Each run has one recipe; one can also mix them, by layer, GEMM and operand"
        f" ([numerics.md](numerics.md#overrides-by-name)).\n\n"
        f"{as_table(content)}\n\n{content['verdict']}\n\n![loss by iteration](recipes.png)\n\n"
        f"Made by `python -m benchmarks.recipes --write --seeds {seeds}`: {describe(record)}. The"
        f" numbers are in benchmarks/results/recipes.json, the columns in [compare.md](compare.md). Another run of"
        f" the same command on the same machine gives the same losses to the last bit.\n\n"
        f"{gradient_formats.section()}"
    )
    shutil.copyfile(out / "compare.png", ROOT / "docs" / "recipes.png")
    results = {"environment": record, "results": content}
    (RESULTS / "recipes.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
