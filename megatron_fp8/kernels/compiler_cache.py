"""Private cache folders for the compilers of Triton and torch.

Both load and run code from their cache folder, so only this user may be able to write to it. torch's default is
``torchinductor_NAME`` under the system's temporary folder; torch does not check an existing folder, so another user who
creates it first can have code run.

A folder named in the environment is the user's choice and is not checked.
"""

from __future__ import annotations

import getpass
import os
import re
import tempfile
import warnings
from collections.abc import Callable, MutableMapping
from pathlib import Path

from .cpu.library import folders, private

TRITON, INDUCTOR = "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"


def settle_triton(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give Triton a private cache folder: its default if that is safe, else another one with a warning."""
    home = environ.get("TRITON_HOME")
    _settle(environ, TRITON, "Triton", lambda: Path(home or Path.home(), ".triton", "cache"))


def settle_inductor(environ: MutableMapping[str, str] = os.environ) -> None:
    """``settle_triton`` for torch.compile. Call it before anything is compiled."""
    _settle(environ, INDUCTOR, "torch", lambda: Path(tempfile.gettempdir(), f"torchinductor_{_user()}"))


def _settle(environ: MutableMapping[str, str], name: str, whose: str, default: Callable[[], Path]) -> None:
    if environ.get(name):
        return
    try:
        why, folder = private(default())
        if why is None and not _writable(folder):
            why = f"{folder} cannot be written"
    except (
        OSError,
        RuntimeError,
    ) as error:  # a read-only disk, or no HOME and a user unknown to the system
        why = f"its own folder cannot be made ({error})"
    if why is None:
        return
    chosen = next(folder for folder in folders() if _writable(folder)) / whose.lower()
    environ[name] = str(chosen)
    warnings.warn(
        f"{whose} keeps its kernels in {chosen}: {why}; set {name} for another folder", stacklevel=4
    )


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def _user() -> str:
    """The user's name as torch writes it in its folder name."""
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        name = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
