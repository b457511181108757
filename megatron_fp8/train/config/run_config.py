"""The typed config of a run: sections, with every value checked."""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...mcore.config.fields import FIELD_RULES, OWN_RULES
from ...mcore.config.rules import Rule
from ...plan.settings import DEFAULT_RECIPE, refuse_recipe_alone
from .field_rules import RULES, check_rules
from .model_section import NAMES, ModelSection, resolve_precision, resolve_tensor_parallel
from .options import check_key, read_options
from .sections import (
    CheckpointSection,
    DataSection,
    OptimizerSection,
    TelemetrySection,
    TrainSection,
    check_decay,
    check_rewinds,
    check_telemetry,
    shorten_warmup,
)

SECTIONS: dict[str, Any] = {
    "model": ModelSection,
    "train": TrainSection,
    "optimizer": OptimizerSection,
    "data": DataSection,
    "checkpoint": CheckpointSection,
    "telemetry": TelemetrySection,
}
_PATHS = (
    "run_dir", "resume", "data.tokenizer", "data.cache_dir", "data.paths", "checkpoint.folder", "model.fp8_size_filter",
    "telemetry.te_config",
)  # fmt: skip


@dataclass
class RunConfig:
    """All settings of a run. Written completely to `<run_dir>/config.yaml`."""

    model: Any = field(default_factory=ModelSection)
    train: TrainSection = field(default_factory=TrainSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    data: DataSection = field(default_factory=DataSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    telemetry: TelemetrySection = field(default_factory=TelemetrySection)
    run_dir: str = "runs/train"
    """Output folder; default: runs/NAME of the config file."""
    resume: str = "auto"
    """'auto' (the latest checkpoint of this run, if there is one), 'never', or the path of a checkpoint or run."""
    dry_run: bool = False
    """Build, report, check the first loss; do not train."""
    debug: bool = False
    """Show tracebacks of bad input."""

    def to_dict(self) -> dict[str, Any]:
        """Plain nested values, in config.yaml's form."""
        return {name: _plain(value) for name, value in vars(self).items()}

    def save(self, path: Path) -> None:
        """Write every value to `path` (YAML); `--config path` repeats the run."""
        path.write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    return value.name if isinstance(value, enum.Enum) else value


def parse(arguments: list[str], ranks: int = 1, base: dict[str, Any] | None = None) -> RunConfig:
    """The run config of a command line. Its options override its files, in any order.

    Args:
        ranks: number of ranks of the run, for a tensor parallel size of 'auto'.
        base: plain values by section, as of a checkpoint's run; files and options override them.

    Raises ValueError in one line for an unknown key (with the nearest known one), for a value of the wrong type or out
    of range, and for a file that is missing or not YAML.
    """
    values, files = read_options(arguments, _kinds(), rule_of, base)
    given: dict[str, dict[str, Any]] = {name: {} for name in ("", *SECTIONS)}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        given[section][name] = value
    top = {"run_dir": f"runs/{Path(files[-1]).stem if files else 'train'}", **given.pop("")}
    run = RunConfig(**{name: SECTIONS[name](**own) for name, own in given.items()}, **top)
    resolve_tensor_parallel(run.model, ranks, sequence_given="model.sequence_parallel" in values)
    for name in SECTIONS:
        check_rules(name, getattr(run, name))
    check_rules("", run)
    for name in run.checkpoint.accept:
        check_key(name, "--checkpoint.accept=", _kinds())
    refuse_recipe_alone(run.model.fp8_recipe, fp8_given="model.fp8" in values)
    if run.model.fp8 and run.model.fp8_recipe is None:
        run.model.fp8_recipe = DEFAULT_RECIPE
    resolve_precision(run.model)
    shorten_warmup(run.train, run.optimizer)
    check_decay(run.train, run.optimizer)
    for name in _PATHS:
        _check_path(name, functools.reduce(getattr, name.split("."), run))
    check_telemetry(run.telemetry)
    check_rewinds(run.train, run.checkpoint, run.telemetry, run.model.fp8_guard)
    return run


def load(path: str | Path, *overrides: str) -> RunConfig:
    """The run config of one file and dotted overrides."""
    return parse([f"--config={path}", *overrides])


@functools.cache
def _kinds() -> dict[str, Any]:
    """Every dotted key -> the type of its value."""
    inner = {f"{name}.{key}": kind for name in SECTIONS for key, kind in _types(SECTIONS[name]).items()}
    return {**inner, **{key: kind for key, kind in _types(RunConfig).items() if key not in SECTIONS}}


def _types(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind)}


def known_keys() -> tuple[str, ...]:
    """Every key of a config file, dotted."""
    return tuple(_kinds())


def rule_of(key: str) -> Rule | None:
    """The rule of a dotted key; None if only its type is checked."""
    section, _, name = key.rpartition(".")
    if name in RULES.get(section, {}):
        return RULES[section][name]
    if section == "model" and name in NAMES:
        return NAMES[name]
    return (FIELD_RULES | OWN_RULES).get(name) if section == "model" else None


def tokens_of_microbatch(run: RunConfig) -> int:
    """M of a run's GEMMs: the tokens that a tensor-parallel group processes at once."""
    return run.train.micro_batch_size * run.train.seq_length // run.model.context_parallel_size


def _check_path(option: str, path: Any) -> None:
    """Raise ValueError if no file can have this path: it is empty, too long, or a cycle of links."""
    if isinstance(path, list):
        for part in path:
            _check_path(option, part)
    elif isinstance(path, str):
        problem = "" if path.strip() else "is empty"
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            pass  # left to its reader or writer
        except OSError as error:
            problem = f"cannot be a path ({error.strerror})"
        if problem:
            raise ValueError(f"{option}={path[:200]!r} {problem}: give another path, or leave {option} out.")
