"""Checks of a config's paths, by option name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...files.folder_kind import is_model_directory, what_to_give


def check_paths(run: Any) -> None:
    """Raise ValueError, with the option's name, if a path is empty, impossible, or a cycle of links.

    Whether the file exists, and its content, is checked by its reader.
    """
    options = {
        "run_dir": run.run_dir,
        "resume": run.resume,
        "data.tokenizer": run.data.tokenizer,
        "data.cache_dir": run.data.cache_dir,
        "checkpoint.folder": run.checkpoint.folder,
        "model.fp8_size_filter": run.model.fp8_size_filter,
        "telemetry.te_config": run.telemetry.te_config,
    }
    for name, path in options.items():
        if isinstance(path, str):
            check_path(name, path)
    for path in run.data.paths:
        check_path("data.paths", path)


def check_path(option: str, path: str) -> None:
    """Raise ValueError if no file or folder can have this path. `option`: the user's option."""
    problem = ""
    if not path.strip():
        problem = "is empty"
    elif "\0" in path:
        problem = "holds a NUL character"
    else:
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return  # left to its reader or writer
        except OSError as error:
            problem = f"cannot be a path ({error.strerror})"
    if problem:
        raise ValueError(f"{option}={path[:200]!r} {problem}: give another path, or leave {option} out.")


def check_config_file(path: str) -> None:
    """Raise ValueError if the `path` of --config cannot be a file. Does not check its content."""
    check_path("--config", path)
    if Path(path).is_dir():
        instead = f"give a YAML file, such as {path.rstrip('/')}/config.yaml"
        if is_model_directory(Path(path)):
            instead = what_to_give(Path(path)) or instead
        raise ValueError(f"--config={path} is a folder: {instead}.")
