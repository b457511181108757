"""Reads the YAML file of --config, and checks its sections."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

from ...files.example_configs import which_config
from ...files.strict_yaml import read_yaml
from ...mcore.config.rules import shown
from ...plan.settings import without_fp8_format


def read_config(path: str, sections: Container[str]) -> dict[str, Any]:
    """The content of a config file by name, with ``sections`` as dicts.

    `model.fp8_format` gets its current name.

    Raises ValueError, with the file's name, if it is missing, too large, not YAML or empty, or has a value for a
    section.
    """
    try:
        content = read_yaml(Path(path))
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ValueError(f"--config={path!r}: {reason}. {which_config(path)}") from error
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
    if "model" in content and "model" in sections:
        try:
            content["model"] = without_fp8_format(content["model"])
        except ValueError as error:
            raise ValueError(f"--config={path}: model.{error}") from error
    return content


def by_dotted_key(content: dict[str, Any], sections: Container[str]) -> dict[str, Any]:
    """The values of a config file; keys in a section become SECTION.KEY."""
    result = {}
    for name, value in content.items():
        entries = (
            {f"{name}.{key}": item for key, item in value.items()} if name in sections else {name: value}
        )
        result.update(entries)
    return result
