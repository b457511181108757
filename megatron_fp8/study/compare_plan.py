"""The runs of a comparison, checked before the first starts.

Runs differ in recipe and seed only. Runs with the same seed start from the same weights and read the same
batches in the same order, so their losses are compared in pairs; differences between seeds show the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from ..files.atomic_io import as_value_error
from ..files.checkpoint import complete_checkpoints
from ..files.records import read_lines
from ..files.strict_yaml import read_yaml
from ..recipe import check_recipe_name
from ..train.config import run_config
from ..train.config.model_section import ModelSection, transformer_config
from ..train.config.ranks import check_layout, least_ranks
from ..train.config.run_config import RunConfig
from ..train.resume import parent_checkpoint

BASELINE = "bf16"
"""The model without FP8: in its own dtype, BF16 unless the config says otherwise."""
_NOT_COMPARED = ("run_dir", "resume", "dry_run", "debug", "checkpoint", "telemetry")
_NOT_COMPARED_KEYS = ("train.log_interval", "train.count_saved", "data.cache_dir")
_OURS = ("run_dir", "resume", "dry_run", "train.seed", "train.count_saved")
_OF_FP8 = (
    *("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    *("tp_only_amax_red",),
)


@dataclass(frozen=True)
class PlannedRun:
    """One run.

    Attributes:
        recipe, seed: 'bf16' or a recipe's name, with its own options.
        folder: its run_dir.
        arguments: for `megatron-fp8 train`.
        config: the resulting config.
    """

    recipe: str
    seed: int
    folder: Path
    arguments: tuple[str, ...]
    config: RunConfig

    @property
    def name(self) -> str:
        """Label: 'mxfp8, seed 1234'."""
        return f"{self.recipe}, seed {self.seed}"

    @property
    def iterations(self) -> int:
        """Number of iterations to train."""
        return self.config.train.train_iters

    @property
    def finished(self) -> bool:
        """Whether it was trained to the end, including the last validation. Raises ValueError for an invalid line."""
        return not self.lacks()

    def lacks(self) -> str:
        """What is missing, with the file name; '' if it is finished. Raises ValueError for an invalid line."""
        required = ["metrics.jsonl", *(["validation.jsonl"] if self.config.train.eval_iters else [])]
        for name in required:
            path = self.folder / name
            found = list(read_lines(path))
            done = found[-1].iteration() if found else 0
            if done < self.iterations:
                cut = path.is_file() and path.read_bytes().rpartition(b"\n")[2]
                why = ", and its last line is cut off" if cut else ""
                return f"{path} ends with iteration {done} of {self.iterations}{why}"
        return ""

    def check_existing(self) -> None:
        """Raises ValueError if the folder contains a run with other settings, naming the first that differs."""
        path = self.folder / "config.yaml"
        if not path.exists():
            return
        with as_value_error(
            f"{str(path)!r} cannot be read",
            ": give another --out, or move that run away.",
            (OSError, ValueError),
        ):
            found = read_yaml(path)
        existing, ours = _settings(found), _settings(self._plain)
        option_keys = {
            option.partition("=")[0].removeprefix("--").replace("-", "_") for option in self.arguments
        }
        # Names the user's options first, since other settings depend on them.
        for key in sorted(ours.keys() | existing.keys(), key=lambda key: (key not in option_keys, key)):
            if existing.get(key) != ours.get(key):
                raise ValueError(
                    f"{self.folder} holds a run with {key}={existing.get(key)!r}, and this comparison has"
                    f" {ours.get(key)!r}: give another --out, or move that run away."
                )

    @cached_property
    def _plain(self) -> Any:
        return yaml.safe_load(yaml.safe_dump(self.config.to_dict()))


@dataclass(frozen=True)
class Comparison:
    """Config, options, recipes, seeds, ranks per run, and the runs, seed by seed."""

    config: str
    overrides: tuple[str, ...]
    recipes: tuple[str, ...]
    seeds: tuple[int, ...]
    ranks: int
    out: Path
    runs: tuple[PlannedRun, ...]


def plan(
    config: str, recipes: str, seeds: str, overrides: Sequence[str], out: Path | None, ranks: int | None
) -> Comparison:
    """The comparison for a command line.

    Args:
        config: as for `train`.
        recipes: comma-separated names; 'bf16' is added first if missing. Options of the model may follow a name:
            'nvfp4+fp4_disable_rht'.
        seeds: a count, starting from the config's seed; or several comma-separated seeds.
        overrides: options for all runs.
        out: output folder; None: runs/compare-CONFIG.
        ranks: processes per run; None: the minimum for the layout.

    Raises:
        ValueError: one line naming the error, before any training.
    """
    if ranks is not None and ranks < 1:
        raise ValueError(f"--ranks={ranks} must be at least 1: how many processes train a run.")
    for option in overrides:
        name = option.partition("=")[0].removeprefix("--").replace("-", "_")
        if name in _OURS:
            raise ValueError(
                f"--{name} is what a comparison sets itself: leave it out (--seeds, --out and --recipes)."
            )
    names = _recipes(recipes)
    base = run_config.parse([f"--config={config}", *overrides], ranks or 1)
    if base.checkpoint.folder is not None:
        raise ValueError(
            f"checkpoint.folder={base.checkpoint.folder!r} would be one folder for all runs, and each would go on from"
            " another's checkpoint: leave it out, or give --checkpoint.folder=null. Each run saves in its own folder, in"
            " --out."
        )
    numbers = _seeds(seeds, base.train.seed)
    model = base.model
    ranks = least_ranks(model) if ranks is None else ranks
    check_layout(model, base.train, ranks)
    out = Path("runs") / f"compare-{Path(config).stem}" if out is None else out
    runs = []
    for seed in numbers:
        for name in names:
            folder = out / "runs" / f"{name}-seed-{seed}"
            options = [*overrides, *_options(name, model), f"--train.seed={seed}", "--train.count_saved=true"]
            from_parent = base.resume not in ("auto", "never") and not _has_begun(folder / "checkpoints")
            resume = base.resume if from_parent else "auto"
            arguments = [f"--config={config}", *options, f"--run_dir={folder}", f"--resume={resume}"]
            with as_value_error(name, errors=ValueError):
                run = run_config.parse(arguments, ranks)
                if seed == numbers[0]:
                    transformer_config(run.model)
            runs.append(PlannedRun(name, seed, folder, tuple(arguments), run))
    return Comparison(config, tuple(overrides), names, numbers, ranks, out, tuple(runs))


def _has_begun(checkpoints: Path) -> bool:
    """Whether --resume=auto continues this run. A folder without a checkpoint or record of the start is from a killed
    start; auto would begin there with random weights."""
    return bool(complete_checkpoints(checkpoints)) or (checkpoints / parent_checkpoint.FILE).exists()


def _recipes(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name != BASELINE:
            check_recipe_name(name.partition("+")[0])
        if "/" in name:
            raise ValueError(f"--recipes: {name} names its run's folder, and cannot contain '/'.")
        if names.count(name) > 1:
            raise ValueError(f"--recipes={text} names {name} twice: once is enough.")
    names = [BASELINE, *(name for name in names if name != BASELINE)]
    if len(names) < 2:
        raise ValueError(
            f"--recipes={text} compares nothing with {BASELINE}: add a recipe, such as tensorwise."
        )
    return tuple(names)


def _seeds(text: str, first: int) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts) or (len(parts) == 1 and not 1 <= int(text) <= 100):
        raise ValueError(
            f"--seeds={text} must be how many (1 to 100), or seeds separated by commas, such as 1,2,3."
        )
    if len(parts) == 1:
        return tuple(range(first, first + int(text)))
    numbers = tuple(int(part) for part in parts)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"--seeds={text} names a seed twice: each run would be the same again.")
    return numbers


def _options(run: str, model: Any) -> list[str]:
    """Options that select a recipe and its own options: 'nvfp4+fp4_disable_rht', 'delayed+fp8_margin=2'. For the
    baseline: all FP8 options at their defaults."""
    name, *own = run.split("+")
    return [
        *_recipe_options(name, model),
        *(f"--model.{key if '=' in key else f'{key}=true'}" for key in own),
    ]


def _recipe_options(name: str, model: Any) -> list[str]:
    if name == "nvfp4":
        return ["--model.fp8=null", "--model.fp8_recipe=null", "--model.fp4=e2m1"]
    if name != BASELINE:
        off = ["--model.fp4=null"] if model.fp4 else []
        return [*off, *([] if model.fp8 else ["--model.fp8=hybrid"]), f"--model.fp8_recipe={name}"]
    default = ModelSection()
    keys = [key for key in vars(model) if key.startswith(("fp8", "fp4")) or key in _OF_FP8]
    changed = [key for key in keys if getattr(model, key) != getattr(default, key)]
    return [f"--model.{key}={_as_option(getattr(default, key))}" for key in dict.fromkeys(["fp8", *changed])]


def _as_option(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def _settings(content: Any) -> dict[str, Any]:
    """Dotted key -> value, for the settings that must match, without logging and checkpoints."""
    found: dict[str, Any] = {}
    for name, value in (content if isinstance(content, dict) else {}).items():
        if name in _NOT_COMPARED:
            continue
        inner = value if isinstance(value, dict) else {}
        found.update({f"{name}.{key}": item for key, item in inner.items()} if inner else {name: value})
    return {key: value for key, value in found.items() if key not in _NOT_COMPARED_KEYS}
