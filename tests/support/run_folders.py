"""Folders as runs leave them, written without a training: what a report is made from.

python -m tests.support.run_folders FOLDER [--large]     two of them to look at
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
TENSORS = ("input", "weight", "grad_output", "output", "dgrad", "wgrad")
OF_VALUES = (
    "cur_amax", "mean", "std", "min", "max", "l1_norm", "l2_norm", "dynamic_range", "kurtosis", "nonfinite",
)  # fmt: skip
OF_CODES = ("underflows%", "overflows%", "sqnr_db", "mse", "scale_inv_min", "scale_inv_max")


def sites(layers: int) -> list[str]:
    """Names of the sites of a GPT."""
    return [f"decoder.layers.{layer}.{linear}" for layer in range(layers) for linear in LINEARS]


def write_run(
    folder: Path,
    *,
    layers: int = 2,
    iterations: int = 40,
    every: int = 10,
    seed: int = 0,
    tensors: Sequence[str] = TENSORS,
    fields: Callable[[dict[str, Any]], dict[str, Any]] = lambda line: line,
    metrics: Callable[[dict[str, Any]], dict[str, Any]] = lambda line: line,
) -> Path:
    """A run's folder; ``every=0``: without telemetry. ``fields`` and ``metrics`` change lines before they are written."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    report = {
        "device": "CPU x86_64, 2 cores",
        "versions": {"python": "3.11.0"},
        "parallel": {
            "launcher": "one process", "world_size": 1, "backend": "gloo", "tensor": 1, "pipeline": 1,
            "virtual_pipeline": None, "context": 1, "expert": 1, "data": 1, "sequence_parallel": False,
            "threads_per_rank": 1,
        },
        "parameters": {"total": 1000, "non_embedding": 800},
        "precision": {
            "bf16": True, "fp16": False, "fp8": "hybrid", "fp8_recipe": "mxfp8",
            "phases": [
                {"phase": "warm-up", "precision": "bf16", "first": 1, "last": iterations // 8},
                {"phase": "fp8", "precision": "fp8", "first": iterations // 8 + 1, "last": iterations},
            ],
        },
        "sites": [_site(name, layers) for name in sites(layers)],
    }  # fmt: skip
    (folder / "report.json").write_text(json.dumps(report))
    _write(folder / "metrics.jsonl", (metrics(_metrics(i, random)) for i in range(1, iterations + 1)))
    validations = range(10, iterations + 1, max(10, iterations // 8))
    _write(folder / "validation.jsonl",
           ({"iteration": i, "validation_loss": 4 * i**-0.2 + 0.1} for i in validations))  # fmt: skip
    if every:
        lines = _telemetry(sites(layers), tensors, range(every, iterations + 1, every), random)
        _write(folder / "telemetry.jsonl", map(fields, lines))
    return folder


def _write(path: Path, lines: Any) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _site(name: str, layers: int) -> dict[str, Any]:
    layer = int(name.split(".")[2])
    if layer in (0, layers - 1):
        return {
            "name": name, "layer": layer, "precision": "bf16", "recipe": None, "backend": None, "roles": {},
            "gemms": dict.fromkeys(("fprop", "dgrad", "wgrad"), "bf16"), "notes": [],
            "reason": "first_last_layers_bf16: the first and last layers stay in BF16",
        }  # fmt: skip
    return {
        "name": name, "layer": layer, "precision": "fp8", "recipe": "mxfp8", "backend": "emulated",
        "gemms": {"fprop": "fp8", "dgrad": "fp8", "wgrad": "bf16" if name.endswith("fc2") else "fp8"},
        "roles": {"input": "e4m3 1x32 e8m0", "weight": "e4m3 1x32 e8m0", "grad_output": "e5m2 1x32 e8m0"},
        "notes": [],
        "reason": "no GPU: emulated" + ("; fp8_overrides '*fc2:wgrad': bf16" if name.endswith("fc2") else ""),
    }  # fmt: skip


def _metrics(iteration: int, random: np.random.Generator) -> dict[str, Any]:
    return {
        "iteration": iteration, "lm_loss": 4 * iteration**-0.2 + 0.05 * random.standard_normal(),
        "grad_norm": float(np.exp(random.normal(0, 0.3))), "learning_rate": 1e-3 * min(1, iteration / 20),
        "tokens": 1024 * iteration, "tokens_per_s": 5000 + 100 * random.standard_normal(), "mfu": None, "skipped": 0,
        "loss_scale": None, "nonfinite": 0, "fp8_gemms": 24, "hp_gemms": 8, "amax_collectives": 1,
        "peak_memory": 900 << 20, "mtp_loss": None,
    }  # fmt: skip


def _telemetry(names: list[str], tensors: Sequence[str], when: range, random: np.random.Generator) -> Any:
    level = {(site, tensor): random.normal(0, 1.5) for site in names for tensor in tensors}
    for iteration in when:
        for site in names:
            for tensor in tensors:
                size = float(
                    np.exp(level[site, tensor] + 0.1 * random.standard_normal() + iteration / when.stop)
                )
                noise = np.exp(0.1 * random.standard_normal(16))
                line = {"iteration": iteration, "site": site, "tensor": tensor}
                line |= dict(
                    zip(OF_VALUES, (size, 1e-3 * noise[0], size / 8 * noise[1], -size * noise[2], size * noise[3],
                        900 * size * noise[4], 30 * size * noise[5], 14 * noise[6], 6 * noise[7], 0), strict=True)
                )  # fmt: skip
                if tensor in TENSORS[:3]:
                    lost = max(0.0, 0.4 * float(noise[8]) - 0.38) * 10
                    values = (
                        lost,
                        0.0,
                        31 * noise[9],
                        1e-5 * size * noise[10],
                        size / 448,
                        size / 448 * noise[11],
                    )
                    line |= dict(zip(OF_CODES, values, strict=True))
                yield line


def main(folder: Path, large: bool) -> None:
    """Two runs, the second with trouble of all kinds."""

    def trouble(line: dict[str, Any]) -> dict[str, Any]:
        if line["site"].endswith("3.mlp.linear_fc1") and line["tensor"] == "input":
            ill = line["iteration"]
            line["cur_amax"] = [float("nan"), float("inf"), None, 1e4][ill // 10 % 4]
            line["underflows%"] = 60.0
        return line

    def skipping(line: dict[str, Any]) -> dict[str, Any]:
        if line["iteration"] in (70, 71, 72, 110):
            line |= {"skipped": 1, "nonfinite": 12, "grad_norm": None, "lm_loss": None}
        return line

    size = {"layers": 32, "iterations": 2000} if large else {"layers": 6, "iterations": 200}
    write_run(folder / "plain", **size)  # type: ignore[arg-type]
    ill = write_run(folder / "ill", **size, seed=1, fields=trouble, metrics=skipping)  # type: ignore[arg-type]
    events = [(60, "save", "iter_0000060"), (73, "restart", "resumed from iter_0000060"),
              (120, "guard", "decoder.layers.3.mlp.linear_fc1: mxfp8 to bf16")]  # fmt: skip
    _write(ill / "events.jsonl", ({"iteration": i, "event": kind, "text": text} for i, kind, text in events))
    advice = {
        "site": "decoder.layers.3.mlp.linear_fc1", "role": "input", "cause": "values underflow", "underflows%": 60.0,
        "line": "--model.fp8_overrides={'decoder.layers.3.mlp.linear_fc1': 'bf16'}",
    }  # fmt: skip
    (ill / "advice.json").write_text(json.dumps([advice]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--large" in sys.argv)
