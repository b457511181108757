"""What a user's path means: a shipped config, a run or a model directory.

The repository's examples/configs has the only copy of the configs; building a wheel copies it to `configs/` in the
package (setup.py), so that an installed package has them too.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from .atomic_io import error_text, read_regular, refuse_link_out

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "examples" / "configs")
"""Folders of an installed package and of a checkout."""


def example_configs() -> dict[str, Path]:
    """Name -> file of every shipped config."""
    return {path.stem: path for folder in _FOLDERS for path in sorted(folder.glob("*.yaml"))}


def config_hint(word: str) -> str:
    """' Did you mean --config ...?' for a command-line word that names a shipped config or a YAML file; else ''."""
    is_config = word in example_configs() or word.endswith((".yaml", ".yml"))
    return f" Did you mean --config {word}?" if is_config else ""


def config_choices(given: str) -> str:
    """For messages: shipped configs with a similar name, and the list of all."""
    names = list(example_configs())
    name = Path(given).stem.lower()
    near = [
        known_name for known_name in names if name and known_name.startswith(name)
    ] or difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return f"{hint}Shipped ones, by name: {', '.join(names)}."


def find_config(given: str) -> str:
    """The file for `--config=given`: the path itself if it exists, else the shipped config of this name.

    Any other name is returned unchanged; opening it then raises the error.
    """
    if os.path.exists(given) or os.path.basename(given) != given:
        return given
    shipped = example_configs().get(given.removesuffix(".yaml"))
    return given if shipped is None else str(shipped)


# ------------------------------------------------------------------------------------------------- folders

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
        return b'"model_type"' in read_regular(folder / "config.json", _LARGEST)
    except (OSError, ValueError):
        return False


def path_hint(path: Path) -> str | None:
    """What to give instead of ``path``, which is neither a run nor a checkpoint; None: unknown."""
    if is_model_directory(path):
        return f"it is a model as transformers saves it; make a run of it first: megatron-fp8 import {path} RUN_DIR"
    if (path / "adapter_config.json").is_file():
        return (
            "it is an adapter; merge it into its model (merge_and_unload), save that, and make a run of it:"
            " megatron-fp8 import MODEL RUN_DIR"
        )
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
    from .strict_yaml import read_yaml  # late: help texts need no PyYAML

    path = run_dir / _CONFIG
    try:
        refuse_link_out(path)
        content = read_yaml(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:
        return f" Its {_CONFIG}, which may say where they are, cannot be read ({error_text(error)})."
    section = content.get("checkpoint") if isinstance(content, dict) else None
    folder = section.get("folder") if isinstance(section, dict) else None
    if not isinstance(folder, str) or not folder:
        return ""
    from_where = "" if Path(folder).is_absolute() else ", which counts from where that run was started"
    return f" Its {_CONFIG} has checkpoint.folder={folder!r}{from_where}: if you know it, give that folder."
