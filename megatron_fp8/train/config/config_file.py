"""The file that --config names: its YAML, with sections where sections belong."""

from __future__ import annotations

import re
from collections.abc import Collection, Container
from pathlib import Path
from typing import Any

from ...files.shipped import shipped_configs
from ...files.strict_yaml import load_yaml, read_yaml
from ...mcore.config.rules import shown


def read_config(path: str, sections: Container[str]) -> dict[str, Any]:
    """What stands in a config file, by name; each of ``sections`` that does is a dict of its own.

    Raises ValueError, which names the file: it is not there, too large, no YAML, empty, or has a value for a section.
    """
    try:
        content = read_yaml(Path(path))
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        shipped = ", ".join(shipped_configs())
        raise ValueError(f"--config={path!r}: {reason}. Shipped ones, by name: {shipped}.") from error
    except ValueError as error:
        raise ValueError(f"--config={path} is not YAML: {error}") from error
    if content is None:
        raise ValueError(f"--config={path} is empty: it needs keys such as model and train.")
    if not isinstance(content, dict):
        raise ValueError(f"--config={path} holds no sections: it needs keys such as model and train.")
    for name, section in content.items():
        if name in sections and section is None:
            raise ValueError(
                f"--config={path}: {name}={shown(section)} must be a section, and it is empty: are the lines below it"
                f" indented under {name}:? Or leave it out."
            )
        if name in sections and not isinstance(section, dict):
            raise ValueError(
                f"--config={path}: {name}={shown(section)} must be a section: write {name}: {{KEY: VALUE}}, or leave"
                " it out."
            )
    return content


def by_dotted_key(content: dict[str, Any], sections: Container[str]) -> dict[str, Any]:
    """The values of a config file, those in a section as SECTION.KEY."""
    found = {}
    for name, value in content.items():
        inner = {f"{name}.{key}": item for key, item in value.items()} if name in sections else {name: value}
        found.update(inner)
    return found


_LINE = re.compile(r"(  )?(\w+):")  # as yaml.safe_dump writes a section, or a key of one


def text_without(path: str, content: dict[str, Any], keys: Collection[str]) -> str | None:
    """The text of a config file, whose ``content`` is known, without the lines of the dotted ``keys`` of its sections.

    Every other line is as it was. None where lines do not say which keys they are of: the file is not as it is written
    for a run.
    """
    rest: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict) and value:
            left = {key: item for key, item in value.items() if f"{name}.{key}" not in keys}
            rest.update({name: left} if left else {})
        else:
            rest[name] = value
    kept, section, dropped = [], "", False
    for line in Path(path).read_text(encoding="utf-8").splitlines(keepends=True):
        found = _LINE.match(line)
        if found and found[1]:
            dropped = section not in rest or f"{section}.{found[2]}" in keys
        elif found:
            section = found[2]
            dropped = section not in rest
        if not dropped:
            kept.append(line)
    text = "".join(kept)
    try:
        same = load_yaml(text.encode()) == rest
    except ValueError:
        same = False
    return text if same else None
