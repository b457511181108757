"""Recognises runs and model directories, for messages about wrong paths."""

from __future__ import annotations

from pathlib import Path

from .atomic_io import in_words, read_ordinary, refuse_link_out
from .strict_yaml import read_yaml

RUN_FILES = ("report.json", "metrics.jsonl", "telemetry.jsonl")
"""The folder of a run that has trained has at least one of these."""

_LARGEST = 1 << 20
_CONFIG = "config.yaml"
_MOST = 6
"""Most runs that a message names."""


def is_run(folder: Path) -> bool:
    """Whether a folder belongs to a run that has trained, or was made by `import`."""
    imported = (folder / _CONFIG).is_file() and (folder / "checkpoints").is_dir()
    return imported or any((folder / name).is_file() for name in RUN_FILES)


def is_model_directory(folder: Path) -> bool:
    """Whether a folder holds a model in the format of transformers' save_pretrained."""
    try:
        return b'"model_type"' in read_ordinary(folder / "config.json", _LARGEST)
    except (OSError, ValueError):
        return False


def what_to_give(path: Path) -> str | None:
    """What to give instead of ``path``, which is neither a run nor a checkpoint; None: unknown."""
    if is_model_directory(path):
        return f"it is a model as transformers saves it; make a run of it first: megatron-fp8 import {path} RUN_DIR"
    try:
        runs = sorted(str(folder) for folder in path.iterdir() if is_run(folder)) if path.is_dir() else []
    except OSError:  # no permission to list it
        runs = []
    if runs:
        more = f" and {len(runs) - _MOST} more" if len(runs) > _MOST else ""
        return f"give one of the runs in it: {', '.join(runs[:_MOST])}{more}"
    run = next((folder for folder in list(path.absolute().parents)[:3] if is_run(folder)), None)
    if run is not None:
        return f"give the run that it lies in: {run}"
    return None


def note_checkpoint_folder(run_dir: Path) -> str:
    """A sentence about the checkpoint.folder in a run's config.yaml; '' if it has none or does not exist.

    Nothing follows it: a run's folder may come from another user, and `export` of such a folder could disclose one of
    the reader's own checkpoints. A relative path counts from the run's working directory, which is not known later.
    """
    path = run_dir / _CONFIG
    try:
        refuse_link_out(path)
        content = read_yaml(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:
        return f" Its {_CONFIG}, which may say where they are, cannot be read ({in_words(error)})."
    section = content.get("checkpoint") if isinstance(content, dict) else None
    folder = section.get("folder") if isinstance(section, dict) else None
    if not isinstance(folder, str) or not folder:
        return ""
    from_where = "" if Path(folder).is_absolute() else ", which counts from where that run was started"
    return f" Its {_CONFIG} has checkpoint.folder={folder!r}{from_where}: if you know it, give that folder."
