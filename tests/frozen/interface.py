"""What users type: commands with their options and defaults, config keys, documented Python names."""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import megatron_fp8
from benchmarks.options import options_of, parser_of
from megatron_fp8.commands.main import COMMANDS
from megatron_fp8.train.config.run_config import RunConfig

ROOT = Path(__file__).parents[2]
_IMPORT = re.compile(r"^\s*from (megatron_fp8[\w.]*) import (?:\(([^)]*)\)|([\w ,]+))", re.MULTILINE)
_DOTTED = re.compile(r"\b(megatron_fp8(?:\.\w+)+)\b")


def commands() -> dict[str, dict[str, Any]]:
    """Command -> option -> its default, as text."""
    return {
        name: {row[0]: None for row in options_of(name)}
        if name == "train"
        else {
            " ".join(action.option_strings) or action.dest: repr(action.default)
            for action in parser_of(name)._actions
        }
        for name in COMMANDS
    }


def keys() -> dict[str, list[str]]:
    """Section of a run's config -> 'key = default' of each."""
    config = RunConfig()
    found = {}
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        found[section.name] = (
            [f"{one.name} = {getattr(value, one.name)!r}" for one in dataclasses.fields(value)]
            if dataclasses.is_dataclass(value)
            else [repr(value)]
        )
    return found


def documented() -> list[str]:
    """Each name that README, docs and examples import or write with dots, as 'megatron_fp8.nn.convert_to_fp8'."""
    found = set()
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")):
        text = path.read_text()
        found |= set(_DOTTED.findall(text))
        for module, inside, bare in _IMPORT.findall(text):
            names = [name.split(" as ")[0].strip() for name in (inside or bare).split(",")]
            found |= {f"{module}.{name}" for name in names if name.isidentifier()}
    return sorted(name for name in found if resolves(name))


def resolves(dotted: str) -> bool:
    """Whether it is a module, or a chain of attributes of one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for name in parts[length:]:
            value = getattr(value, name, None)
        return value is not None
    return False


def signatures() -> dict[str, str]:
    """Public name -> its parameters, of what the package itself exports."""
    found = {}
    for name in megatron_fp8.__all__:
        value = getattr(megatron_fp8, name)
        if callable(value):
            try:
                found[name] = ", ".join(
                    one.name if one.default is one.empty else f"{one.name}={_text(one.default)}"
                    for one in inspect.signature(value).parameters.values()
                )
            except ValueError:
                found[name] = "none that can be read"
    return found


def _text(default: Any) -> str:
    return (
        repr(default)
        if default is None or isinstance(default, bool | int | float | str | tuple)
        else "an object"
    )
