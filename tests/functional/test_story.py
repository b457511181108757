"""docs/diagnose.md: every command in it is run, and what it quotes is what they print.

Figures are those of one processor. Losses may be off by a tenth, figures in tables and behind % by a factor of three.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ROOT, lines, run, torchrun
from tests.support.model_faults import batches, loss_of, trained

pytestmark = pytest.mark.timeout(900)  # its fixture runs the whole story

PAGE = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
STORY = PAGE.partition("## A model of your own")[0]
BLOCKS = re.findall(r"^```(bash|)\n(.*?)^```", STORY, re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?=[\s,;:)%|]|$)")
QKV = [f"decoder.layers.{layer}.self_attention.linear_qkv" for layer in (0, 1)]


def commands(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()


def words(command: str, folder: Path) -> list[str]:
    """As a shell would split it, with the text of a file where `$(cat FILE)` stands."""
    return [
        re.sub(r"\$\(cat (\S+)\)", lambda found: (folder / found[1]).read_text(), word)
        for word in shlex.split(command)
    ]


def execute(command: str, folder: Path) -> str:
    """Run it; what it printed and said. It must succeed."""
    program, *rest = words(command, folder)
    if program == "cat":
        return (folder / rest[0]).read_text()
    before = {"megatron-fp8": ["-m", "megatron_fp8"], "python": []}[program]
    done: subprocess.CompletedProcess[str] = run(*before, *rest, cwd=folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return f"{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("story")
    (path / "examples").symlink_to(ROOT / "examples")
    return path


@pytest.fixture(scope="module")
def told(folder) -> list[tuple[str, str]]:
    """(what the page quotes, what the commands before it printed), for each quotation."""
    found, printed = [], ""
    for kind, block in BLOCKS:
        if not kind:
            found.append((block, printed))
            continue
        printed = "".join(execute(c, folder) for c in commands(block) if "launch" not in c.split()[:2])
    return found


def plain(line: str) -> tuple[str, list[float]]:
    """A line without its numbers and its padding, and its numbers."""
    values = [float(value.replace(",", "")) for value in NUMBER.findall(line)]
    return re.sub(r"[\s-]+", " ", NUMBER.sub("#", line)).strip(), values


def near(ours: float, theirs: float, loosely: bool) -> bool:
    return abs(ours - theirs) <= 0.1 or (loosely and 1 / 3 < ours / (theirs or 1e-9) < 3)


def stands_in(quoted: str, printed: str) -> bool:
    """Whether a line has these words and about these numbers; '...' is what the quotation leaves out at its ends."""
    text, values = plain(quoted.strip().removeprefix("...").removesuffix("..."))
    loosely = quoted.startswith("|") or "%" in quoted
    for line in printed.splitlines():
        other, numbers = plain(line)
        start = other.find(text)
        if start < 0 or (start and not quoted.startswith("...")):
            continue
        if not quoted.endswith("...") and len(other) > start + len(text):
            continue
        first = other[:start].count("#")
        pairs = list(zip(values, numbers[first : first + len(values)], strict=True))
        if all(near(a, b, loosely) for a, b in pairs):
            return True
    return False


def test_what_the_page_quotes_is_what_its_commands_print(told):
    assert len(told) >= 6
    for block, printed in told:
        if block.startswith("decoder."):  # overrides, looked at below
            continue
        for line in block.splitlines():
            assert line.strip("| .") == "" or stands_in(line, printed), f"{line}\nis not in\n{printed}"


def test_figures_between_quotations_stand_in_them():
    quoted = [float(value.replace(",", "")) for _, block in BLOCKS for value in NUMBER.findall(block)]
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", re.sub(r"```.*?```", "", STORY, flags=re.DOTALL))
    figures = re.findall(r"\d+\.\d+", prose)
    assert figures
    for figure in figures:
        digits = len(figure.partition(".")[2])
        assert any(f"{value:.{digits}f}" == figure for value in quoted), f"{figure} is quoted nowhere"


def losses(folder: Path, name: str) -> list[float]:
    return [line["lm_loss"] for line in lines(folder / "runs" / name / "metrics.jsonl")]


def test_the_run_is_ruined_by_two_sites_and_cured_by_the_overrides(told, folder):
    bf16, fp8, cured = (losses(folder, name) for name in ("bf16", "fp8", "cured"))
    assert min(b - a for a, b in zip(bf16, fp8, strict=True)) > 2
    assert max(abs(a - b) for a, b in zip(bf16, cured, strict=True)) < 0.02
    found = json.loads((folder / "runs/fp8/diagnosis/diagnosis.json").read_text())
    assert sorted({key.partition(":")[0] for key in found["overrides"]}) == QKV
    assert {row["site"] for row in found["ranking"] if row["stands_out"]} == set(QKV)
    assert found["high_precision"]["losses"][0] < 1 < 3 < found["planned"]["losses"][0]
    assert found["planned"]["update_error"] > 2 * found["at_best"]["update_error"] > 0
    (overrides,) = (block for kind, block in BLOCKS if not kind and f"{QKV[0]}:weight: bf16" in block)
    named = [line for line in overrides.splitlines() if not line.startswith("#")]
    assert sorted({line.partition(":")[0] for line in named}) == QKV
    largest = {
        line["site"]: line["cur_amax"]
        for line in lines(folder / "runs/fp8/telemetry.jsonl")
        if (line["iteration"], line["tensor"]) == (1, "weight")
    }
    assert {site for site, amax in largest.items() if amax > 2**23} == set(QKV)
    assert max(amax for site, amax in largest.items() if site not in QKV) < 4


@pytest.mark.long
def test_ranks_find_the_same_two_sites(told, folder):
    (command,) = (
        c for kind, block in BLOCKS if kind == "bash" for c in commands(block) if "launch" in c.split()[:2]
    )
    rest = words(command, folder)
    figures = folder / "ranks.json"
    assert rest[1:4] == ["launch", "--ranks", "2"]
    done = run("-m", "megatron_fp8", *rest[1:], "--json", figures, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert found["world_size"] == 2
    assert sorted({key.partition(":")[0] for key in found["overrides"]}) == QKV


@pytest.mark.long
def test_a_run_on_two_ranks_diagnosed_by_the_scales_of_one_is_said_to_be_another(told, folder):
    """Of two ranks' shards the small weights have a scale of their own, and the run is healthy."""
    (train,) = (
        c for kind, block in BLOCKS if kind == "bash" for c in commands(block) if "run_dir=runs/fp8 " in c
    )
    rest = [word for word in words(train, folder)[1:] if not word.startswith("--run_dir")]
    layout = ["--model.tensor_model_parallel_size=2", "--train.train_iters=12", "--run_dir=runs/ranks"]
    done = torchrun("-m", "megatron_fp8", *rest, *layout, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert losses(folder, "ranks")[-1] < 1
    found = run("-m", "megatron_fp8", "diagnose", "runs/ranks", "--iteration", "11", cwd=folder)
    assert found.returncode == 0 and "megatron-fp8 launch --ranks 2 diagnose has the run's" in found.stderr
    assert found.stdout.startswith("This is not what the run computed")


def test_the_page_s_python_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    model, _ = trained(0)
    names: dict[str, Any] = {"model": model, "loss_of": loss_of, "batches": batches(0)}
    exec(code, names)
    assert names["found"].ranking[0].site in dict(model.named_modules())
    reference = (ROOT / "docs" / "api" / "training.md").read_text(encoding="utf-8")
    for one in (names["found"], names["found"].ranking[0]):
        assert f"{type(one).__module__}.{type(one).__name__}" in reference
        described = set(re.findall(r"\w+", str(type(one).__doc__).partition("Attributes:")[2]))
        assert set(vars(one)) <= described, "a field is described nowhere"
