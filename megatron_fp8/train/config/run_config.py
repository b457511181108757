"""The typed config of a run: YAML files, then dotted options.

    megatron-fp8 train --config FILE --model.fp8=hybrid --train.train_iters=300

Names may be written with '-' for '_'. A later option overrides an earlier one, and options override files.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from ...files.data_option import data_as_paths
from ...files.example_configs import config_hint, find_config
from ...mcore.config.fields import FIELD_RULES, OWN_RULES
from ...mcore.config.rules import Rule, shown
from ...plan.key_hint import nearest_key
from ...plan.settings import DEFAULT_RECIPE, field_meant, refuse_recipe_alone
from .config_file import by_dotted_key, read_config
from .field_rules import RULES, check_rules
from .model_section import NAMES, ModelSection, settle_precision, settle_tensor_parallel
from .paths import check_config_file, check_paths
from .sections import (
    CheckpointSection,
    DataSection,
    OptimizerSection,
    TelemetrySection,
    TrainSection,
    check_loss_scaling,
    check_rewinds,
    check_sections,
    check_telemetry,
    settle_warmup,
)

SECTIONS: dict[str, Any] = {
    "model": ModelSection,
    "train": TrainSection,
    "optimizer": OptimizerSection,
    "data": DataSection,
    "checkpoint": CheckpointSection,
    "telemetry": TelemetrySection,
}
_FREE_FORM = frozenset({"model.fp8_overrides"})  # its keys are chosen by the user
_FREE_WORDS = 'a mapping, as \'{"*.linear_fc2": "bf16"}\' is, or {} for none'
_LISTS = frozenset(f"telemetry.{name}" for name in ("sites", "tensors", "statistics", "what_if"))
_FLAGS = frozenset({"dry_run", "debug"})
_OWN = ("run_dir", "resume", *sorted(_FLAGS))  # keys outside the sections
_NOT_IN_FILES = frozenset({"config", "print_config"})


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
    """Where the run writes; the config file's name replaces 'train' when it is not given."""
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


def parse(arguments: list[str], ranks: int = 1) -> RunConfig:
    """The run config of a command line. Its options override its files, in any order.

    ``ranks``: number of ranks of the run, for a tensor parallel size of 'auto'.

    Raises ValueError in one line for an unknown key (with the nearest known one), for a value of the wrong type or out
    of range, and for a file that is missing or not YAML.
    """
    arguments = _files_first(_with_config_files(_normalise(data_as_paths(arguments))))
    # Key -> (written value, its file). Later files override earlier ones.
    given: dict[str, tuple[Any, str]] = {}
    files = []
    for name, value in _option_pairs(arguments):
        if not name:
            raise ValueError("-- alone is not an option: leave it out, and write --section.key=value.")
        if value is None:
            raise ValueError(f"--{name} has no value: write --{name}=VALUE.")
        _check_text({name: value})
        if name == "config":
            check_config_file(value)
            files.append(value)
            content = read_config(value, SECTIONS)
            for key in _keys(content):
                _check_key(key, f"{value}: ", in_file=True)
            items = by_dotted_key(content, SECTIONS)
            at_default = {key for key in items.keys() - given.keys() if _is_default(key, items[key])}
            # A run's own file has every key, mostly defaults, and the parser searches all keys for each.
            text = yaml.safe_dump(_without(content, at_default), sort_keys=False)
            arguments = [
                f"--config={text}" if argument == f"--config={value}" else argument for argument in arguments
            ]
            given.update({key: (item, f"{value}: ") for key, item in items.items()})
        elif name not in _NOT_IN_FILES:
            _check_key(name, "--")
            given.setdefault(name, (value, ""))
    values = _typed(arguments, given)
    sections = {name: kind(**values.get(name, {})) for name, kind in SECTIONS.items()}
    own = {name: values[name] for name in _OWN if values.get(name) is not None}
    own.setdefault("run_dir", f"runs/{Path(files[-1]).stem if files else 'train'}")
    run = RunConfig(**sections, **own)
    settle_tensor_parallel(run.model, ranks, sequence_given="model.sequence_parallel" in given)
    for name in SECTIONS:
        check_rules(name, getattr(run, name))
    check_rules("", run)
    for name in run.checkpoint.accept:
        _check_key(name, "--checkpoint.accept=")
    _check_text(run.to_dict())
    refuse_recipe_alone(run.model.fp8_recipe, fp8_given=run.model.fp8 is not None or "model.fp8" in given)
    if run.model.fp8 and run.model.fp8_recipe is None:
        run.model.fp8_recipe = DEFAULT_RECIPE
    settle_precision(run.model)
    settle_warmup(run.train, run.optimizer)
    check_sections(run.train, run.optimizer, run.checkpoint)
    check_loss_scaling(run.optimizer, fp16=run.model.fp16)
    check_paths(run)
    check_telemetry(run.telemetry)
    check_rewinds(run.train, run.checkpoint, run.telemetry, run.model.fp8_guard)
    return run


@functools.cache
def _defaults() -> dict[str, Any]:
    """Scalar defaults by key, except whole defaults of float fields (`100`), which a file has as floats."""
    floats = {
        f"{name}.{item.name}"
        for name, kind in SECTIONS.items()
        for item in dataclasses.fields(kind)
        if "float" in str(item.type)
    }
    return {
        key: value
        for key, value in by_dotted_key(RunConfig().to_dict(), SECTIONS).items()
        if "." in key
        and (value is None or isinstance(value, (bool, int, float, str)))
        and not (type(value) is int and key in floats)
    }


def _without(content: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """A config file's content without these dotted keys."""
    rest = {}
    for name, value in content.items():
        inside = isinstance(value, dict)
        remaining = (
            {key: item for key, item in value.items() if f"{name}.{key}" not in keys} if inside else value
        )
        if remaining or not inside:
            rest[name] = remaining
    return rest


def _is_default(key: str, value: Any) -> bool:
    return key in _defaults() and repr(value) == repr(
        _defaults()[key]
    )  # -0.0 differs from 0.0, and 1 from 1.0


def _typed(arguments: list[str], given: dict[str, tuple[Any, str]]) -> dict[str, Any]:
    """The given values by section, converted to their types. Raises ValueError with key, value and rule."""
    try:
        # Without defaults, which the dataclasses have: to process all 300 keys takes eight times as long.
        parsed = _parser().parse_args(arguments, defaults=False)
    except Exception as error:  # the parser, YAML and types raise various errors for bad values
        message = " ".join(str(error).split()) or type(error).__name__
        key = next((key for key in _KEY.findall(message) if key in given), None)
        if key is None:
            raise ValueError(message) from error
        rule = rule_of(key)
        words = rule.words if rule else _FREE_WORDS if key in _FREE_FORM else f"of its type ({message})"
        value, where = _rejected_option(key, arguments) or given[key]
        raise ValueError(
            f"{where}{key}={shown(value)} must be {words}: change it, or leave it out."
        ) from error
    return parsed.as_dict() if hasattr(parsed, "as_dict") else vars(parsed)


def _rejected_option(key: str, arguments: list[str]) -> tuple[str, str] | None:
    """The first option with this key that the parser rejects, in the form of `given`; None: a file's value is wrong."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name.removesuffix("+") == f"--{key}":
            try:
                _parser().parse_args([argument] if equals else [argument, following], defaults=False)
            except Exception:  # as in _typed
                return (value if equals else following), ""
    return None


_KEY = re.compile(r"[Kk]ey [\"']([\w.]+)")  # the key in jsonargparse's messages


def rule_of(key: str) -> Rule | None:
    """The rule of a dotted key; None if only its type is checked."""
    section, _, name = key.rpartition(".")
    if name in RULES.get(section, {}):
        return RULES[section][name]
    if section == "model" and name in NAMES:
        return NAMES[name]
    return (FIELD_RULES | OWN_RULES).get(name) if section == "model" else None


def load(path: str | Path, *overrides: str) -> RunConfig:
    """The run config of one file and dotted overrides."""
    return parse([f"--config={path}", *overrides])


def tokens_of_microbatch(run: RunConfig) -> int:
    """M of a run's GEMMs: the tokens that a tensor-parallel group processes at once."""
    return run.train.micro_batch_size * run.train.seq_length // run.model.context_parallel_size


@functools.cache
def _parser() -> ArgumentParser:
    """The parser, cached: building it is slower than using it, and parsing does not change it."""
    parser = ArgumentParser(prog="megatron-fp8 train", exit_on_error=False, add_help=False)
    parser.add_argument("--config", action="config")
    for name, kind in SECTIONS.items():
        parser.add_argument(f"--{name}", type=kind, default=kind())
    defaults = RunConfig()
    parser.add_argument("--run_dir", type=str | None, default=None)
    parser.add_argument("--resume", type=str, default=defaults.resume)
    parser.add_argument("--dry_run", type=bool, default=defaults.dry_run)
    parser.add_argument("--debug", type=bool, default=defaults.debug)
    return parser


def _normalise(arguments: Iterable[str]) -> Iterator[str]:
    """Normalise options: underscores in names, values for bare flags, the current name of `model.fp8_format`."""
    rest = iter(arguments)
    for argument in rest:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            name = name.replace("-", "_")
            if name in _LISTS and equals and not value.startswith("["):
                yield f"--{name}={json.dumps(value.split(','))}"
            elif name == "checkpoint.accept" and equals and not value.startswith("["):
                yield from (f"--checkpoint.accept+={part}" for part in value.split(","))
            elif name == "model.fp8_format" and (equals or (value := next(rest, ""))):
                yield f"--model.{field_meant(value)}={value}"
            elif name in _FLAGS and not equals:
                yield f"--{name}=true"
            else:
                yield f"--{name}{equals}{value}"
        else:
            yield argument


def _with_config_files(arguments: Iterator[str]) -> Iterator[str]:
    """Replace names of shipped configs by their files."""
    previous = ""
    for argument in arguments:
        if previous == "--config":
            yield find_config(argument)
        elif argument.startswith("--config="):
            yield f"--config={find_config(argument.removeprefix('--config='))}"
        else:
            yield argument
        previous = argument


def _files_first(arguments: Iterator[str]) -> list[str]:
    """Move `--config=FILE` options to the front, as one word each, in their order."""
    files, rest = [], []
    for argument in arguments:
        if argument.startswith("--config="):
            files.append(argument)
        elif argument == "--config" and (value := next(arguments, None)) is not None:
            files.append(f"--config={value}")
        else:
            rest.append(argument)
    return files + rest


def _option_pairs(arguments: list[str]) -> Iterator[tuple[str, str | None]]:
    """(name, value or None) of every `--name=value` and `--name value`. A stray word is a ValueError."""
    pending: str | None = None
    for argument in arguments:
        if argument.startswith("--"):
            if pending is not None:
                yield pending, None
            name, equals, value = argument[2:].partition("=")
            name = name.removesuffix("+")
            pending = None if equals else name
            if equals:
                yield name, value
        elif pending is not None:
            yield pending, argument
            pending = None
        else:
            hint = config_hint(argument)
            raise ValueError(
                f"{argument!r} is not an option: options are --config FILE and --section.key=value.{hint}"
            )
    if pending is not None:
        yield pending, None


def _keys(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and not prefix and name in SECTIONS:
            yield from _keys(value, f"{key}.")
        else:
            yield key


_OFFLOADED, _AWARE = (
    "Megatron-Core's optimizer on the CPU is not offered here: its masters are no FP8 parameters', and nobody has run it"
    " beside them",
    "Megatron-Core's precision-aware optimizer is not offered here: it is Transformer Engine's FusedAdam",
)
_NOT_OFFERED = {
    **dict.fromkeys(
        (
            "optimizer_cpu_offload", "optimizer_offload_fraction", "use_torch_optimizer_for_cpu_offload",
            "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params",
        ),
        f"{_OFFLOADED}. optimizer.use_distributed_optimizer=true divides masters and moments over ranks",
    ),
    **dict.fromkeys(
        (
            "use_precision_aware_optimizer", "store_param_remainders", "main_grads_dtype", "main_params_dtype",
            "exp_avg_dtype", "exp_avg_sq_dtype",
        ),
        f"{_AWARE}. optimizer.state_dtype=fp8 keeps moments in 3 bytes a parameter",
    ),
}  # fmt: skip
"""Options of Megatron-Core's OptimizerConfig -> why they are not supported, and the alternative."""


@functools.cache  # called for each key of a file
def known_keys() -> tuple[str, ...]:
    """Every key of a config file, dotted."""
    top = [item.name for item in dataclasses.fields(RunConfig) if item.name not in SECTIONS]
    inner = [f"{name}.{item.name}" for name, kind in SECTIONS.items() for item in dataclasses.fields(kind)]
    return (*inner, *top)


def _check_key(key: str, where: str, *, in_file: bool = False) -> None:
    """Raise ValueError for an unknown key. ``in_file``: from a file, whose indentation may be wrong."""
    known = known_keys()
    if key in SECTIONS:
        raise ValueError(f"{where}{key} is a section: give its keys, --{key}.KEY=VALUE.")
    if key in known or any(key.startswith(f"{free}.") for free in _FREE_FORM):
        return
    if key in (f"optimizer.{name}" for name in _NOT_OFFERED):
        raise ValueError(f"{where}{key}: {_NOT_OFFERED[key.partition('.')[2]]}.")
    section, _, name = key.rpartition(".")
    near = nearest_key(key, known)
    hint = f" Did you mean {near}?" if near else " Sections are " + ", ".join(SECTIONS) + "."
    by_last_part = [other for other in known if other.rpartition(".")[2] == name]
    owner = by_last_part[0].rpartition(".")[0] if by_last_part else ""
    if in_file and name in SECTIONS:
        hint = f" It is a section: is it indented too far, under {section}:?"
    elif in_file and by_last_part:
        hint += f" Is it indented under {owner}:?" if owner else f" Is it indented too far, under {section}:?"
    raise ValueError(f"{where}{key} is not a known key.{hint}")


def _check_text(values: dict[str, Any], prefix: str = "") -> None:
    """Raise ValueError if a setting contains a NUL or is not UTF-8."""
    for name, value in values.items():
        if isinstance(value, dict):
            _check_text(value, f"{prefix}{name}.")
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, str) and "\0" in part:
                raise ValueError(f"{prefix}{name}={value!r} holds a NUL character: write it without.")
            if isinstance(part, str) and part.encode("utf-8", "replace").decode("utf-8") != part:
                raise ValueError(
                    f"{prefix}{name}={value!r} holds bytes that are no UTF-8, and config.yaml could not hold them: choose"
                    " another name."
                )
