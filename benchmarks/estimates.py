"""Tables of estimates on 8 to 2,048 GPUs, of Llama-3 8B and 70B, Qwen3-30B-A3B and DeepSeek-V3:
`python -m benchmarks.estimates [--write]`

Bytes of the fullest rank, and the step's time by a roofline of data-sheet peaks: no GPU is needed, and none was measured.
--write puts all of it into benchmarks/results/estimates.md, and the bytes on an H100 into docs/estimates.md between its
marks.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from benchmarks.common import RESULTS, put_between, table
from megatron_fp8.estimate.config_reader import read
from megatron_fp8.estimate.device import device
from megatron_fp8.estimate.estimate import Estimate, estimate
from megatron_fp8.estimate.memory_fit import RESERVE
from megatron_fp8.estimate.parameter_counts import totals

PAGE = Path(__file__).parents[1] / "docs" / "estimates.md"
FULL = RESULTS / "estimates.md"
CONFIGS = Path(__file__).parents[1] / "examples" / "configs"
DEVICES = ("h100", "b200")
RUNS = {
    "BF16": ["--model.fp8=null"],
    "FP8": [],
    "FP8, fp8_param": ["--model.fp8_param=true"],
}
"""Title of a run -> its options over the shipped config."""

# GPUs -> (layout in words, options), as far as it is not the shipped one.
_STAGES = "--model.pipeline_model_parallel_size={}", "--model.virtual_pipeline_model_parallel_size={}"


def _pipeline(stages: int, parts: str) -> list[str]:
    return [option.format(value) for option, value in zip(_STAGES, (stages, parts), strict=True)]


def _uneven(stages: int, first: int, last: int, experts: int) -> list[str]:
    return [
        f"--model.pipeline_model_parallel_size={stages}",
        f"--model.num_layers_in_first_pipeline_stage={first}",
        f"--model.num_layers_in_last_pipeline_stage={last}",
        f"--model.expert_model_parallel_size={experts}",
    ]


LAYOUTS: dict[str, dict[int, tuple[str, list[str]]]] = {
    "llama3_8b": {gpus: ("TP 4", []) for gpus in (8, 64, 256, 1024, 2048)},
    "llama3_70b": {
        8: ("TP 8", _pipeline(1, "null")),
        16: ("TP 8, PP 2", _pipeline(2, "5")),
        **{gpus: ("TP 8, PP 4 x 5", []) for gpus in (32, 64, 256, 1024, 2048)},
    },
    "qwen3_30b_a3b": {gpus: ("PP 2, EP 8", []) for gpus in (64, 256, 1024, 2048)},
    "deepseek_v3": {
        64: ("PP 8, EP 8", _uneven(8, 8, 5, experts=8)),
        256: ("PP 16, EP 16", _uneven(16, 4, 1, experts=16)),
        **{gpus: ("PP 16, EP 64", []) for gpus in (1024, 2048)},
    },
}
TITLES = {
    "llama3_8b": "Llama-3 8B",
    "llama3_70b": "Llama-3 70B",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "deepseek_v3": "DeepSeek-V3 671B",
}


def estimates(name: str, gpus: int, on: str) -> dict[str, Estimate]:
    """The runs of one row."""
    options = [f"--config={CONFIGS / name}.yaml", *LAYOUTS[name][gpus][1]]
    return {title: estimate(read([*options, *more], gpus), device(on)) for title, more in RUNS.items()}


@functools.cache
def rows(name: str, on: str) -> list[list[str]]:
    """A row for each number of GPUs."""
    made = []
    there = device(on).memory * (1 - RESERVE)
    for gpus, (layout, _) in LAYOUTS[name].items():
        found = estimates(name, gpus, on)
        memory = []
        for one in found.values():
            total = one.fullest.total
            memory.append(f"{total / 1e9:.1f}{'' if total <= there else ' (too much)'}")
        times = {title: one.time for title, one in found.items()}
        bf16, fp8 = times["BF16"], times["FP8"]
        ranks = found["FP8"].settings.data_parallel
        made.append(
            [
                f"{gpus:,}",
                f"{layout}, DP {ranks}",
                *memory,
                f"{bf16.seconds:.2f}",
                f"{fp8.seconds:.2f}",
                f"{fp8.seconds / bf16.seconds:.2f}",
            ]
        )
    return made


def section(name: str, on: str) -> str:
    """One table with its title and what it is."""
    counted = totals(read([f"--config={CONFIGS / name}.yaml"]).model)
    header = ["GPUs", "layout", *(f"{title} GB" for title in RUNS), "BF16 s", "FP8 s", "FP8 / BF16"]
    return "\n".join(
        [
            f"### {TITLES[name]} on {on}",
            "",
            f"A roofline from a data sheet ({device(on).source}), not a measurement: times are lower bounds.",
            f"{counted.total:,} parameters, {counted.active:,} of them for a token.",
            "",
            table(header, rows(name, on)),
        ]
    )


def full() -> str:
    """All tables, as a page."""
    title = "# Estimates of shipped configs\n\n`python -m benchmarks.estimates --write`\n\n"
    said = "Estimated, not measured: [how they are made](../../docs/estimates.md).\n\n"
    return title + said + "\n\n".join(section(name, on) for name in LAYOUTS for on in DEVICES) + "\n"


def memory(name: str) -> list[list[str]]:
    """Two rows of the documentation's table: layout and GB on an H100, on 64 and on 2,048 GPUs."""
    return [[TITLES[name], *row[:5]] for row in rows(name, "h100") if row[0] in ("64", "2,048")]


def summary() -> str:
    """The documentation's table."""
    header = ["model", "GPUs", "layout", *(f"{title} GB" for title in RUNS)]
    return table(header, [row for name in LAYOUTS for row in memory(name)])


BEGIN, END = "<!-- python -m benchmarks.estimates --write: from here -->", "<!-- to here -->"


def main() -> int:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/estimates.md and benchmarks/results")
    text = full()
    if parser.parse_args().write:
        FULL.write_text(text, encoding="utf-8")
        put_between(PAGE, BEGIN, END, summary())
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
