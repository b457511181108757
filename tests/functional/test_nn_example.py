"""examples/convert_model.py does what it says, and so does the beginning of docs/pytorch.md."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fp8.nn import (
    DEFAULT_SKIP,
    Fp8Linear,
    fp8_autocast,
    fp8_state_dict,
    fp8_step,
    load_fp8_state_dict,
)

ROOT = Path(__file__).parents[2]


def blocks_of_the_page() -> list[str]:
    """The Python of docs/pytorch.md, unindented."""
    found = re.findall(
        r"^( *)```python\n(.*?)^ *```", (ROOT / "docs" / "pytorch.md").read_text(), re.DOTALL | re.M
    )
    return [textwrap.dedent(body) for _, body in found]


def test_the_page_runs(tmp_path):
    """Every block but the one for many ranks, in their order, on one model; names of the page are filled in."""

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    model, batch = fresh(), torch.randn(8, 32)
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "batch": batch,
        "torch": torch,
    }
    names |= {"path": tmp_path / "saved", "fp8_step": fp8_step, "fp8_autocast": fp8_autocast}
    names |= {"fp8_state_dict": fp8_state_dict, "load_fp8_state_dict": load_fp8_state_dict}
    first, in_parts, skip, experts, step, trainer, regions, resume, sharded = blocks_of_the_page()
    exec(first, names)
    assert isinstance(model[0], Fp8Linear)
    parts = nn.ModuleDict({"blocks": nn.ModuleList([fresh(), fresh()])})
    known = {"model": parts, "convert_to_fp8": names["convert_to_fp8"], "DEFAULT_SKIP": DEFAULT_SKIP}
    exec(in_parts, known)
    assert [block[0].fp8_config.recipe for block in parts.blocks] == ["blockwise", "tensorwise"]
    layers = nn.ModuleDict({"layers": nn.ModuleList([fresh(), fresh()]), "router": nn.Linear(32, 32)})
    layers.layers[1].router = nn.Linear(32, 512)
    layers.layers[1].wide = nn.Linear(512, 32)
    exec(skip.replace("model", "layers"), {"layers": layers, "convert_to_fp8": names["convert_to_fp8"]})
    assert layers.fp8_report.converted == ["layers.1.wide"]
    mixture: dict[str, Any] = {}
    exec(experts, mixture)
    assert {f"model.layers.{layer}.mlp.experts.7.down" for layer in (0, 1)} <= {
        *mixture["model"].fp8_report.converted
    }
    names["loss"] = model(batch).sum()
    exec(step, names)
    assert names["counts"].fp8_gemms == 5
    assert "Fp8Callback()" in trainer  # test_integrations.py runs it
    exec(regions, names)
    assert 0 < (names["reference"] - names["other"]).norm() < 0.2 * names["reference"].norm()
    fp8_step(model)
    save, load = resume.split("...\n")
    exec(save, names)
    exec(load, {**names, "saved": torch.load(names["path"])})
    assert "fully_shard(block)" in sharded


@pytest.mark.parametrize("recipe", ["delayed"])
def test_the_example_learns_in_fp8_as_in_float32(forking_python, recipe):
    script = ROOT / "examples" / "convert_model.py"
    run = subprocess.run(
        [forking_python, str(script), "--recipe", recipe],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={
            "PYTHONPATH": str(ROOT),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "HOME": str(Path.home()),
        },
    )
    assert run.returncode == 0, run.stderr
    assert "8 of 16 modules with parameters run in FP8" in run.stdout
    assert re.search(r"blocks\.0-1\.qkv \(2\) +Linear +192 x 64 +delayed, \w+", run.stdout)
    assert (
        re.search(r"lm_head +Linear +256 x 64 +float32 +5\n", run.stdout)
        and " 5  skip 'lm_head'" in run.stdout
    )
    start, fp8_start = (float(x) for x in re.search(r"^ +1 +(\S+) +(\S+)$", run.stdout, re.M).groups())
    end, fp8_end = (float(x) for x in re.search(r"^ +end +(\S+) +(\S+)", run.stdout, re.M).groups())
    assert abs(start - fp8_start) < 0.02 and end < start - 2 and abs(end - fp8_end) < 0.1
    error = float(re.search(r"by (\S+)% of the logits", run.stdout).group(1))
    assert 0.5 < error < 15
