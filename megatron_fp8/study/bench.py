"""A benchmark of FP8 against BF16 on this machine: measurement, table, verdict, file for fp8_size_filter."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..backends import choose_backend, warn_slow_backend
from ..files.atomic_io import as_value_error, read_regular, write_result
from ..files.manifest import LARGEST
from ..files.strict_json import load_json
from ..files.terminal import printable
from ..kernels.cpu.emulation import MAX_THREADS
from ..kernels.torch_products import is_replaced, replace_slow
from ..numerics.formats import parse_format
from ..plan.gemm_size_table import FORMAT, Gemm, load_table, roles_of
from ..plan.settings import RecipeSettings, from_settings
from ..plan.timing import LEAST_FOR_SPREAD, device_label, table
from ..recipe import RECIPES, Recipe, check_recipe_name, recipe_name
from ..state.collectives import own_device
from . import StudyFailed
from .bench_linear import SECTIONS, Bench, torchao_linear, torchao_missing

_CPU_SHAPES = [Gemm(512, 1024, 512)]
_GPU_SHAPES = [Gemm(4096, 6144, 8192), Gemm(4096, 28672, 8192), Gemm(8192, 8192, 8192)]
_CPU_GRID = [Gemm(k, n, t) for t in (256, 1024) for k in (256, 1024) for n in (256, 1024)]
_GPU_GRID = [
    Gemm(k, n, t)
    for t in (1024, 4096, 16384)
    for k in (512, 1024, 2048, 4096, 8192)
    for n in (512, 1024, 2048, 4096, 8192)
]
_PACKAGES = ("torch", "triton", "torchao", "megatron_fp8")


class _Request(NamedTuple):
    """Recipes, shapes and backend from the command line, with names resolved."""

    recipes: list[Recipe]
    shapes: list[Gemm]
    backend: str | None


def bench(options: argparse.Namespace, run_options: list[str]) -> None:
    """Measure, print and write results, by the options of `megatron-fp8 bench`.

    Raises:
        ValueError: bad input.
        StudyFailed: a result was wrong, or the results cannot be written.
    """
    device = own_device()
    _check(options, run_options)
    request = _from_config(options, run_options) if options.config else _from_options(options, device)
    backends = [choose_backend(request.backend, device, recipe) for recipe in request.recipes]
    if options.threads:
        torch.set_num_threads(options.threads)
    replace_slow()
    record = _environment(device)
    old: dict[str, Any] | None = None
    if options.compare:
        old = read_earlier(options.compare)
        check_comparable(old, record, options.compare)
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        measured = _measure(options, request, backends, record, device)
        if old is not None:
            print(printable(changes_table(changes(old["rows"], measured.rows))))
    if measured.wrong:
        raise StudyFailed(f"{len(measured.wrong)} results were wrong; nothing is written")
    result = {**record, "rows": measured.rows}
    if options.json:
        print(json.dumps(result, indent=1))
    lost = ": what was measured is lost"  # such as by a full disk
    with as_value_error(f"--out={options.out} cannot be written", lost, raises=StudyFailed):
        if options.tune:
            _write_table(options.out, record, request.recipes[0], backends[0][0].name, measured.rows)
        elif options.out:
            _write(options.out, result)


def _measure(
    options: argparse.Namespace,
    request: _Request,
    backends: list[Any],
    record: dict[str, Any],
    device: torch.device,
) -> Bench:
    """Measure every cell; print the environment first and the table last."""
    facts = {**record, **record["versions"], "versions": None}
    print(", ".join(f"{key} {value}" for key, value in facts.items() if value is not None), flush=True)
    if options.repetitions < LEAST_FOR_SPREAD:
        print(
            f"--repetitions={options.repetitions} shows no spread: --compare will not take these results (at least"
            f" {LEAST_FOR_SPREAD})",
            flush=True,
        )
    measured = Bench(device, options.repetitions)
    sections = ["linear"] if options.tune else _sections(options.only)
    for recipe, (backend, why) in zip(request.recipes, backends, strict=True):
        print(f"{recipe_name(recipe)}: backend {backend.name} ({why})", flush=True)
        warn_slow_backend(backend.name, device, recipe, "--fp8 e4m3")
        for shape in request.shapes:
            for section in sections:
                SECTIONS[section](measured, shape, recipe, backend)
    if options.peers and (reason := torchao_missing()):
        print(f"torchao: not measured: {reason}", flush=True)
    elif options.peers:
        for shape in request.shapes:
            torchao_linear(measured, shape)
    print(_as_table(measured.rows))
    if conclusion := verdict(measured.rows):
        print(conclusion)
    return measured


def _sections(only: str) -> list[str]:
    return list(SECTIONS) if only == "all" else only.split(",")


def _check(options: argparse.Namespace, run_options: list[str]) -> None:
    if run_options and not options.config:
        raise ValueError(
            f"{run_options[0]!r} is not an option of bench; a run's options need --config FILE. See --help."
        )
    for section in _sections(options.only):
        if section not in SECTIONS:
            raise ValueError(f"--only has {section!r}: sections are {', '.join(SECTIONS)}, or all")
    if options.repetitions < 1:
        raise ValueError(f"--repetitions={options.repetitions} must be at least 1")
    if not 0 <= options.threads <= MAX_THREADS:
        raise ValueError(
            f"--threads={options.threads} must be from 1 to {MAX_THREADS}, or 0 for torch's own number"
        )
    if options.config and (options.recipe or options.shape or options.backend):
        raise ValueError(
            "--config gives recipe, shapes and backend: drop --recipe, --shape and --backend, and change them there"
            " (--model.fp8_recipe=..., --model.fp8_backend=...)"
        )
    by_spread = [f"--{name}" for name in ("tune", "compare") if getattr(options, name)]
    if by_spread and options.repetitions < LEAST_FOR_SPREAD:
        raise ValueError(
            f"--repetitions={options.repetitions} shows no spread, by which {by_spread[0]} tells noise: give at least"
            f" {LEAST_FOR_SPREAD}"
        )
    if options.tune and (options.json or options.compare or options.peers):
        raise ValueError(
            "--tune writes a table for fp8_size_filter: give --json, --compare and --peers without it"
        )
    if options.tune and not options.out:
        raise ValueError("--tune writes a table and needs a place for it: add --out FILE")


def _from_options(options: argparse.Namespace, device: torch.device) -> _Request:
    names = (
        [check_recipe_name(name) for name in options.recipe.split(",")]
        if options.recipe
        else ["tensorwise"]
        if options.tune
        else [name for name in RECIPES if name != "custom"]
    )
    if options.tune and len(names) > 1:
        raise ValueError(f"--tune with {len(names)} recipes: a table is of one recipe; give one --recipe")
    if "custom" in names:
        raise ValueError("--recipe=custom: what it does is in a run's config; give --config FILE")
    cpu = device.type == "cpu"
    shapes = [_shape(text) for text in options.shape or ()]
    if not shapes:
        shapes = (_CPU_GRID if cpu else _GPU_GRID) if options.tune else (_CPU_SHAPES if cpu else _GPU_SHAPES)
    settings = RecipeSettings(fp8_format=parse_format(options.fp8))
    return _Request([from_settings(name, settings) for name in names], _distinct(shapes), options.backend)


def _shape(text: str) -> Gemm:
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(
            f"--shape={text} must be three positive integers, KxNxTOKENS, such as 4096x14336x8192"
        )
    return Gemm(*map(int, parts))


def _from_config(options: argparse.Namespace, run_options: list[str]) -> _Request:
    """The GEMMs of one layer on one rank, in the run's recipe."""
    from ..fp8_utils import get_fp8_recipe, quantizes
    from ..mcore.gemm_size_filter import gemm_shapes
    from ..train.config import run_config
    from ..train.config.model_section import transformer_config

    # This command creates the table, so a run's config may name one that does not exist yet.
    run = run_config.load(options.config, *run_options, "--model.fp8_size_filter=null")
    config = transformer_config(run.model)
    if not quantizes(config):
        raise ValueError(
            f"--config={options.config} trains in BF16: add --model.fp8=hybrid to measure FP8 against it"
        )
    shapes = gemm_shapes(config, run_config.tokens_of_microbatch(run)).values()
    return _Request([get_fp8_recipe(config)], _distinct(shapes), config.fp8_backend)


def _distinct(shapes: Any) -> list[Gemm]:
    return list(dict.fromkeys(shapes))


def _environment(device: torch.device) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            # torch's own version: a wheel's metadata do not contain its CUDA version.
            versions[name] = torch.__version__ if name == "torch" else metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": device_label(device),
        "memory_gb": round(_memory(device) / 1e9, 1),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "threads": torch.get_num_threads(),
        "torch_bf16": "in float32, without instructions for it" if is_replaced(torch.bfloat16) else None,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "versions": versions,
    }


def _memory(device: torch.device) -> int:
    """Size of the GPU's memory in bytes, or of this machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _as_table(rows: list[dict[str, Any]]) -> str:
    cells = [
        (
            row["section"],
            f"{row['k']} x {row['n']} x {row['tokens']}",
            row["contender"],
            f"{row['fp8_ms']:.3g}",
            f"{row['bf16_ms']:.3g}",
            f"{row['ratio']:.2f}",
            "" if row["spread"] is None else f"{row['spread']:.0%}",
        )
        for row in rows
    ]
    return table(
        ("section", "K x N x tokens", "recipe", "FP8 ms", "BF16 ms (quantize: copy)", "x BF16", "spread"),
        cells,
    )


_WHOLE = ("step", "layer", "linear", "inference", "gemm")
"""Sections that show whether FP8 pays, the most conclusive first."""


def verdict(rows: list[dict[str, Any]]) -> str:
    """Whether FP8 pays here, for each recipe, by the most conclusive section; '' if none of those has a spread.

    A recipe is faster or slower if it is so in every shape, by more than half the ratio's spread. Otherwise the shapes
    differ, or the spread is too large.
    """
    with_spread = {row["section"] for row in rows if row["spread"] is not None}
    section = next((name for name in _WHOLE if name in with_spread), None)
    by_recipe: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["section"] == section:
            by_recipe.setdefault(row["contender"], []).append(row)
    groups: dict[str, list[str]] = {"faster": [], "slower": [], "mixed": [], "too noisy to tell": []}
    for contender, recipe_rows in by_recipe.items():
        ratios = [row["ratio"] for row in recipe_rows]
        sure = [abs(1 - row["ratio"]) > row["spread"] * row["ratio"] / 2 for row in recipe_rows]
        word = "faster" if max(ratios) < 1 else "slower" if min(ratios) > 1 else "mixed"
        span = f"{min(ratios):.2f}" + (f" to {max(ratios):.2f}" if len(ratios) > 1 else "")
        spread = "" if all(sure) else f", spread up to {max(row['spread'] for row in recipe_rows):.0%}"
        groups[word if all(sure) else "too noisy to tell"].append(f"{contender} ({span} x{spread})")
    parts = [f"{word}: {', '.join(names)}" for word, names in groups.items() if names]
    return f"FP8 against BF16 here, by {section}: {'; '.join(parts)}." if parts else ""


def _write_table(
    path: str, record: dict[str, Any], recipe: Recipe, backend: str, rows: list[dict[str, Any]]
) -> None:
    columns = ("k", "n", "tokens", "fp8_ms", "bf16_ms", "ratio", "spread")
    entries = [{key: row[key] for key in columns} for row in rows]
    described = {"backend": backend, "recipe": recipe_name(recipe), "roles": roles_of(recipe)}
    _write(path, {"format": FORMAT, **record, **described, "rows": entries})
    pays = sum(ratio.pays for ratio in load_table(path).ratios.values())
    print(f"FP8 pays for {pays} of {len(entries)} shapes (it is faster by more than half the spread).")
    if pays:
        print(printable(f"Use it: megatron-fp8 train ... --model.fp8_size_filter={path}"))
    else:
        print("A run that asks for this table is refused: no GEMM would be left in FP8.")


def _write(path: str, content: dict[str, Any]) -> None:
    write_result(Path(path), json.dumps(content, indent=1) + "\n")
    print(printable(f"wrote {path}"))


# ------------------------------------------------------------------------------------------------ earlier results
# Ratios to BF16, which was timed alternately with FP8, are compared: a generally slower machine does not matter. A row's
# noise is the sum of both relative interquartile ranges; smaller changes mean nothing.

VERDICTS = ("faster", "slower", "within noise", "too noisy to tell")
TOO_NOISY = 1.0
"""Above this noise even a cell twice as slow counts as unchanged, so the result is useless."""


@dataclass(frozen=True)
class Change:
    """One cell in both benchmarks: FP8's time over BF16's before and now, the relative change, and the noise."""

    cell: str
    before: float
    now: float
    noise: float

    @property
    def change(self) -> float:
        """Relative to BF16; -0.1 is a tenth faster."""
        return self.now / self.before - 1

    @property
    def verdict(self) -> str:
        """The change in words. A factor of two counts the same in both directions."""
        if self.noise >= TOO_NOISY:
            return "too noisy to tell"
        if max(self.now / self.before, self.before / self.now) - 1 <= self.noise:
            return "within noise"
        return "faster" if self.change < 0 else "slower"


def read_earlier(path: Path) -> dict[str, Any]:
    """An earlier result of `bench --out` or `--json`. Raises ValueError for any other file."""
    try:
        content = load_json(read_regular(path, LARGEST))
        rows = content["rows"]
        if any(row["spread"] is None for row in rows):
            raise ValueError(f"it has no spread, since it has fewer than {LEAST_FOR_SPREAD} repetitions")
        keys = {"section", "k", "n", "tokens", "contender", "ratio", "spread"}
        if not rows or not all(
            keys <= row.keys() and row["ratio"] > 0 and row["spread"] >= 0 for row in rows
        ):
            raise ValueError("its rows are not those of bench")
        str(content["device"])
        {_cell(row) for row in rows}  # checks that cell names are hashable
    except OSError as error:
        raise ValueError(
            f"--compare={path} cannot be read ({error.strerror}): give a file of bench --out"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--compare={path} is no result of bench ({error}): give a file of bench --out"
        ) from error
    return content


def check_comparable(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError if the earlier result is from another device or number of threads."""
    for key in ("device", "threads"):
        if old.get(key) != new.get(key):
            raise ValueError(
                f"--compare={path} is of {key} {old.get(key)!r}, and here it is {new.get(key)!r}: they cannot be compared"
            )


def changes(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Changes of the cells in both, in the order of the new benchmark."""
    before = {_cell(row): row for row in old}
    return [
        Change(name, before[name]["ratio"], row["ratio"], before[name]["spread"] + row["spread"])
        for row in new
        if (name := _cell(row)) in before
    ]


def changes_table(found: Sequence[Change]) -> str:
    """One line per cell, and a summary sentence."""
    if not found:
        return "No cell was measured in both."
    rows = [
        (c.cell, f"{c.before:.2f}", f"{c.now:.2f}", f"{c.change:+.0%}", f"{c.noise:.0%}", c.verdict)
        for c in found
    ]
    counts = {word: sum(c.verdict == word for c in found) for word in VERDICTS}
    summary = ", ".join(f"{count} {word}" for word, count in counts.items() if count or word != VERDICTS[-1])
    header = ("cell", "x BF16 then", "now", "change", "noise", "verdict")
    return f"{table(header, rows)}\nOf {len(found)} cells: {summary}."


def _cell(row: Mapping[str, Any]) -> str:
    return f"{row['section']} {row['k']} x {row['n']} x {row['tokens']} {row['contender']}"
