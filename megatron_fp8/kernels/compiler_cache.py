"""Private cache folders for the compilers of Triton and torch.

Code is loaded only from folders that nobody but this user can have filled.

What lies in such a folder is loaded and run. torch's own choice is ``torchinductor_NAME`` under the system's temporary
folder, which it makes if it is not there and does not look at if it is: whoever makes it first has code of his run.

A folder that the environment names is the user's choice, and left alone.
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
    """Have Triton keep its kernels in a folder of this user alone: its own, or another one, which is said."""
    home = environ.get("TRITON_HOME")
    _settle(environ, TRITON, "Triton", lambda: Path(home or Path.home(), ".triton", "cache"))


def settle_inductor(environ: MutableMapping[str, str] = os.environ) -> None:
    """The same for what torch.compile makes. To be called before anything is compiled."""
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
    ) as error:  # a read-only disk; no HOME, and a user that the system does not know
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
    """As torch names its folder."""
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        name = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
