"""Does FP8 learn what BF16 learns? `megatron-fp8 compare` of recipes, judged, and written into docs.

    python -m benchmarks.recipes                      # examples/configs/tiny_gpt_cpu.yaml, all recipes
    python -m benchmarks.recipes --page moe           # examples/configs/tiny_moe_cpu.yaml, three of them
    python -m benchmarks.recipes --page nvfp4         # NVFP4 without each of its additions; nvfp4_moe: with experts
    python -m benchmarks.recipes --seeds 1234,1,2     # three seeds of weights and data order; each is judged
    python -m benchmarks.recipes --write              # also its page and picture in docs/, and results/PAGE.json
    python -m benchmarks.recipes --recipes mxfp8 --train.train_iters=50 --optimizer.lr_warmup_iters=5

Runs that are complete in --out are read, not repeated. The exit code is 1 if a recipe's loss is more than 1 % from BF16's
with any seed, equals it in all bits, or BF16 did not beat the bigram entropy.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import gradient_formats
from benchmarks.common import RESULTS, describe, environment, put_between
from megatron_fp8.commands.main import main as megatron_fp8
from megatron_fp8.plan.timing import table
from megatron_fp8.study.compare_plan import BASELINE
from megatron_fp8.study.compare_results import as_table

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 0.01
BEGIN = "<!-- python -m benchmarks.recipes --page {name} --write: from here -->"
END = "<!-- to here: {name} -->"
"""A page that has these lines keeps what stands before and behind them."""


def with_costs(content: dict[str, Any]) -> str:
    """Tables of losses and costs, and the verdict."""
    return f"{as_table(content)}\n\n{verdict(content)}"


def without_additions(content: dict[str, Any]) -> str:
    """A table of losses, with each run's distance from plain NVFP4 by seed."""
    plain = {run["seed"]: run["loss"] for run in content["runs"] if run["recipe"] == "nvfp4"}
    rows = []
    for row in content["recipes"]:
        losses = {run["seed"]: run["loss"] for run in content["runs"] if run["recipe"] == row["recipe"]}
        by_seed = ", ".join(f"{losses[seed] - plain[seed]:+.4f}" for seed in plain)
        name, _, option = row["recipe"].partition("+fp4_disable_")
        rows.append((f"{name} without {WITHOUT[option]}" if option else name, f"{row['loss']:.4f}", by_seed))
    return table(("run", "validation loss", "from nvfp4, by seed"), rows)


WITHOUT = {
    "rht": "the transform",
    "stochastic_rounding": "stochastic rounding",
    "2d_quantization": "16x16 blocks",
}
ADDITIONS = ",".join(["mxfp8", "nvfp4", *(f"nvfp4+fp4_disable_{name}" for name in WITHOUT)])


class Page(NamedTuple):
    """A part of docs: what it compares, and what it says of it beside the numbers."""

    title: str
    config: str
    recipes: str
    ranks: str
    layers: str
    section: Callable[[], str]
    about_speed: str = ""
    options: tuple[str, ...] = ()
    tables: Callable[[dict[str, Any]], str] = with_costs
    file: str = ""  # the page's name in docs/, if it is not that of the entry
    learns: bool = True  # BF16 must beat the bigram entropy; False: too short for that


PAGES = {
    "recipes": Page(
        "FP8 against BF16 on a small model",
        "examples/configs/tiny_gpt_cpu.yaml",
        "delayed,tensorwise,rowwise,blockwise,mxfp8",
        "tensor and sequence parallel",
        "First and last layer in BF16, as in the config.",
        gradient_formats.section,
    ),
    "moe": Page(
        "FP8 against BF16 on DeepSeek-V3's architecture, small",
        "examples/configs/tiny_moe_cpu.yaml",
        "blockwise,mxfp8,tensorwise",
        "expert parallel",
        "Grouped experts and a shared one, latent attention, multi-token prediction ([megatron.md](megatron.md)), in E4M3"
        " in all layers.",
        str,
        "; other programs ran beside it, so its speeds say nothing",
    ),
    "nvfp4": Page(
        "A tiny GPT",
        "examples/configs/tiny_gpt_cpu.yaml",
        ADDITIONS,
        "tensor and sequence parallel",
        "First and last layer in BF16.",
        str,
        options=("--train.train_iters=120",),
        tables=without_additions,
    ),
    "nvfp4_moe": Page(
        "With experts",
        "examples/configs/tiny_moe_cpu.yaml",
        ADDITIONS,
        "expert parallel",
        "No layer in BF16.",
        str,
        options=("--train.train_iters=60", "--train.global_batch_size=4", "--train.micro_batch_size=2"),
        tables=without_additions,
        file="nvfp4",
        learns=False,
    ),
}


def main() -> int:
    """Compare, judge, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", choices=PAGES, default="recipes")
    parser.add_argument("--config", help="instead of the page's")
    parser.add_argument("--recipes", help="instead of the page's")
    parser.add_argument("--seeds", default="1234,1", help="as of megatron-fp8 compare (default %(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the comparison (default runs/PAGE)")
    parser.add_argument("--write", action="store_true", help="write docs/PAGE.* and results/PAGE.json")
    wanted, overrides = parser.parse_known_args()
    page, out = PAGES[wanted.page], wanted.out or ROOT / "runs" / wanted.page
    config, recipes = wanted.config or page.config, wanted.recipes or page.recipes
    options = [
        f"--config={config}",
        f"--recipes={recipes}",
        f"--seeds={wanted.seeds}",
        "--ranks=2",
        *page.options,
    ]
    code = megatron_fp8(["compare", *options, f"--out={out}", *overrides])
    if code:
        return code
    content = json.loads((out / "compare.json").read_text())
    wrong = judge(content, learns=page.learns)
    print(wrong or "every run is as it should be")
    if wanted.write:
        write(content, out, wanted.page)
    return 1 if wrong else 0


def judge(content: dict[str, Any], *, learns: bool = True) -> str:
    """What is wrong with a comparison ('' if nothing is)."""
    wrong = []
    baseline = {run["seed"]: run for run in content["runs"] if run["recipe"] == BASELINE}
    for run in content["runs"]:
        bf16 = baseline[run["seed"]]
        off = run["loss"] / bf16["loss"] - 1
        if run is bf16:
            if learns and run["loss"] >= content["bigram_entropy"]:
                wrong.append(f"BF16 did not learn more than bigrams (seed {run['seed']})")
        elif off == 0 or not run["fp8_gemms"]:
            wrong.append(f"{run['recipe']} did not run in FP8 (seed {run['seed']})")
        elif abs(off) > LIMIT:
            wrong.append(f"{run['recipe']} is {off:+.2%} from BF16 (seed {run['seed']})")
    return "; ".join(wrong)


def verdict(content: dict[str, Any]) -> str:
    """The comparison's verdict; one sentence for all recipes where no difference is larger than chance makes them."""
    spread, rows = content["band"]["spread"], [r for r in content["recipes"] if r["recipe"] != BASELINE]
    if any(abs(difference) > spread for row in rows for difference in row["differences"]):
        return content["verdict"]
    said = (
        f"No recipe is further from {BASELINE} than {BASELINE}'s own {len(content['seeds'])} seeds are from each other"
        f" ({spread:.4f} nats), which is a rough measure of chance."
    )
    for word, sign in (("Worse", 1), ("Better", -1)):
        names = [row["recipe"] for row in rows if all(sign * d > 0 for d in row["differences"])]
        said += f" {word} with each seed, but by less than that: {', '.join(names)}." if names else ""
    return f"{said} On a CPU FP8 is emulated: these speeds say nothing about a GPU."


def shown(content: dict[str, Any], name: str, record: dict[str, Any], heading: str) -> str:
    """What docs say of a comparison that was made where `record` tells."""
    page, seeds = PAGES[name], ",".join(map(str, content["seeds"]))
    which = "" if name == "recipes" else f"--page {name} "
    options = f" with `{' '.join(content['overrides'])}`" if content["overrides"] else ""
    return (
        f"{heading} {page.title}\n\n"
        f"`{content['config']}`{options}, {content['iterations']} iterations, {content['ranks']} CPU ranks"
        f" ({page.ranks}), the same data for every run, and for each seed the same weights and order. Validation loss in"
        f" nats a byte; the bigram entropy of the data is {content['bigram_entropy']:.4f}, which a model must beat to"
        f" have learned more than pairs of bytes. {page.layers}\n\n"
        f"{page.tables(content)}\n\n![loss by iteration]({name}.png)\n\n"
        f"Made by `python -m benchmarks.recipes {which}--write --seeds {seeds}`: {describe(record)}. The"
        f" columns are explained in [compare.md](compare.md). Another run on the same machine gives the same losses to"
        f" the last bit{page.about_speed}.\n\n{page.section()}"
    ).rstrip()


def write(content: dict[str, Any], out: Path, name: str) -> None:
    """The page of docs, docs/NAME.png and benchmarks/results/NAME.json, which has the numbers of both."""
    record = {**environment(["megatron-core"]), "threads": 1, "measured": "wall time, one thread a rank"}
    path = ROOT / "docs" / f"{PAGES[name].file or name}.md"
    begin, end = BEGIN.format(name=name), END.format(name=name)
    if begin in path.read_text(encoding="utf-8"):
        put_between(path, begin, end, shown(content, name, record, "##"))
    else:
        path.write_text(f"{shown(content, name, record, '#')}\n", encoding="utf-8")
    shutil.copyfile(out / "compare.png", ROOT / "docs" / f"{name}.png")
    results = {"environment": record, "results": content}
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
