"""A hint for messages: a run's checkpoint folder from its config.yaml. Nothing follows it.

A run's folder may come from another user. If its config.yaml could choose what is read, `export` of such a folder could
disclose one of the reader's own checkpoints. A relative path was relative to the run's working directory, which is not
known later.
"""

from __future__ import annotations

from pathlib import Path

from .atomic_io import in_words, refuse_link_out
from .strict_yaml import read_yaml

CONFIG = "config.yaml"


def note_checkpoint_folder(run_dir: Path) -> str:
    """A sentence about the checkpoint.folder in a run's config.yaml; '' if it has none or does not exist."""
    path = run_dir / CONFIG
    try:
        refuse_link_out(path)
        content = read_yaml(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:
        return f" Its {CONFIG}, which may say where they are, cannot be read ({in_words(error)})."
    section = content.get("checkpoint") if isinstance(content, dict) else None
    folder = section.get("folder") if isinstance(section, dict) else None
    if not isinstance(folder, str) or not folder:
        return ""
    from_where = "" if Path(folder).is_absolute() else ", which counts from where that run was started"
    return f" Its {CONFIG} has checkpoint.folder={folder!r}{from_where}: if you know it, give that folder."
