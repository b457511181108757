"""Every command of README.md and docs/ that takes seconds runs as it is written; of the others it is said why not.

`docs/start.md`, `docs/diagnose.md`, `docs/one_gpu.md` and `docs/finetune.md` have tests of their own, which run each
page from first to last.
"""

from __future__ import annotations

import re

import pytest

from tests.support.command import ROOT, empty_cache, run_each
from tests.support.docs_blocks import blocks
from tests.support.pages import PAGES, SMALL, name

RUN = "runs/tiny_gpt_cpu"
ELSEWHERE = {
    "docs/start.md": "tests/functional/test_docs_blocks.py",
    "docs/diagnose.md": "tests/functional/test_story.py",
    "docs/one_gpu.md": "tests/functional/test_one_gpu.py",
    "docs/finetune.md": "tests/functional/test_finetune_page.py",
}
NOT_HERE = {
    r"make |pip |python -m pip |jupyter ": "installs, tests or opens something",
    r"export |sbatch |torchrun --nnodes": "is for a cluster: tests/functional/test_slurm.py has one of its own",
    r"megatron-fp8 launch ": "takes several processes: tests/functional/test_launch.py",
    r"torchrun ": "takes several processes: tests/functional trains on two ranks with these options",
    r"megatron-fp8 compare ": "trains several runs: tests/functional/test_compare.py",
    r"megatron-fp8 bench": "takes minutes: tests/unit/commands/test_bench.py runs it with small shapes",
    r"megatron-fp8 estimate .*bench.json": "needs what a bench wrote: tests/unit/estimate and benchmarks/roofline.py",
    r"megatron-fp8 (import|export|train) .*runs/llama": "needs a downloaded model: tests/functional/test_hf_fp8.py",
    r"kubectl ": "needs a cluster: tests/unit/examples/test_kubernetes.py looks at the files",
    r"python examples/grpo.py": "takes minutes: tests/functional/test_grpo_example.py",
    r"bash examples/reshard.sh": "trains three times: tests/functional/test_checkpoint_example.py",
    r"megatron-fp8 train --config my.yaml": "needs a GPU's table of sizes: tests/functional/test_size_filter.py",
}
"""Beginning of a command -> why it is not run here."""


def commands() -> list[tuple[str, list[str]]]:
    """(where it stands, its words) of each command of every page."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            if not block.reason and name(page) not in ELSEWHERE:
                found += [(f"{name(page)}:{block.line}", words) for words in block.commands]
    return found


def is_run(words: list[str]) -> bool:
    return not any(re.match(beginning, " ".join(words)) for beginning in NOT_HERE)


def as_here(words: list[str], folder: str) -> list[str]:
    """Its arguments, with a run for what stands for the reader's own; trainings small and short, each in a folder."""
    words = [
        RUN if word in ("RUN", "RUN_DIR") else word
        for word in words[1:]
        if not re.match(r"\[|\.\.\.\]", word)
    ]
    words = ["tiny_gpt_cpu" if word == "CONFIG" else word.replace("=runs/short", f"={RUN}") for word in words]
    return [*words, *SMALL, "--train.train_iters=10", f"--run_dir={folder}"] if words[0] == "train" else words


@pytest.mark.timeout(200)
def test_commands_run(tmp_path):
    """In one process, one after the other: a run of the first, which the others look at."""
    (tmp_path / "words.txt").write_text("every step of a small model is one line of text\n" * 300)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    first = ["megatron-fp8", "train", "--config", "tiny_gpt_cpu", "--telemetry.every=10"]
    wanted = [("the run", as_here(first, RUN))]
    shown = {tuple(words): where for where, words in reversed(commands())}  # each once, where it stands first
    for number, (words, where) in enumerate(reversed(shown.items())):
        if is_run(list(words)):
            assert words[0] == "megatron-fp8", (where, words)
            wanted.append((where, as_here(list(words), f"runs/of-{number}")))
    cases = dict(enumerate(words for _, words in wanted))
    found = run_each(tmp_path, cases, cwd=tmp_path, XDG_CACHE_HOME=empty_cache(tmp_path), timeout=180)
    for (where, words), (code, said, printed) in zip(wanted, found.values(), strict=True):
        assert code == 0, f"{where}: {' '.join(words)}\n{said[-2000:]}"
        assert printed or said, f"{where}: {' '.join(words)} says nothing"
    assert len(wanted) > 18
    pages = {where.partition(":")[0] for where, _ in wanted}
    assert {
        "README.md",
        "docs/doctor.md",
        "docs/estimates.md",
        "docs/recipes.md",
        "docs/inference.md",
    } <= pages


def test_every_reason_is_of_a_command_and_names_tests_that_are():
    written = [" ".join(words) for _, words in commands()]
    for beginning, reason in NOT_HERE.items():
        assert any(re.match(beginning, line) for line in written), beginning
        for test in re.findall(r"\S+\.py", reason):
            assert (ROOT / test).is_file(), test
    for test in ELSEWHERE.values():
        assert (ROOT / test).is_file(), test
