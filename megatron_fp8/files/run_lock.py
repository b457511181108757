"""A file lock that gives a folder to one run, on any file system. Its owner renews it.

    .lock    {"owner": a random name, "host", "pid", "job", "since", "beats", ...}, rewritten every few seconds

A run takes over an existing lock at once if its owner has certainly ended or belongs to the same job: the same SLURM
job (requeued, or a step of it restarted), the same torchrun, or an ended process of this machine. Otherwise it watches
the lock: while the beats advance, the lock is held; after a minute without a beat, it is stale. This machine's own
clock measures that minute, so the clocks of two machines need not agree. The file is rewritten in place: another
machine's open then sees the new content, while a new file with the old name may be hidden by a cache.

An owner that was wrongly considered dead (suspended for minutes, or cut off from the file system) finds another owner
in the file before its next write: `check` raises.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .atomic_io import in_words, read_ordinary
from .strict_json import load_json

LOCK = ".lock"
BEAT_S, STALE_S = 5.0, 60.0
"""Seconds between beats; seconds without a beat until a lock is stale, as long as NFS caches a file."""
_SETTLE_S = 0.3
"""Seconds to wait after a takeover: another run may take over at the same moment."""
_OF_SLURM = "SLURM job "
_SIZE = 2048
"""Constant size of the file in bytes: it is rewritten in one write, and never needs more space."""
_NAME = 100
"""Longest part of a given name in characters, of up to six bytes each, so that all of it fits."""


class LockHeld(ValueError):
    """Another run has locked the folder.

    Attributes:
        who: describes that run.
    """

    def __init__(self, text: str, who: str) -> None:
        super().__init__(text)
        self.who = who


class RunLock:
    """Locks a folder, which it creates, from `take` to `release`. One process of a run has the lock.

    Args:
        folder: the folder to lock.
        option: the user's option for the folder, for messages.
        environ: identifies the job.
        beat, stale: seconds, as BEAT_S and STALE_S.
    """

    def __init__(
        self,
        folder: Path,
        option: str,
        *,
        environ: Mapping[str, str] = os.environ,
        beat: float = BEAT_S,
        stale: float = STALE_S,
    ) -> None:
        self.folder, self.option = folder, option
        # Absolute: the renewing thread must not write elsewhere if the program changes its working directory.
        self.path = folder.absolute() / LOCK
        self._beat, self._stale = beat, stale
        self._record: dict[str, Any] = {
            "owner": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": _process(os.getpid()),
            "job": job_name(environ),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "beats": 0,
        }
        self._made: list[Path] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, say: Callable[[str], None]) -> None:
        """Create the folder and lock it.

        Args:
            say: prints a line about a wait or a takeover.

        Raises LockHeld if another run has the lock; OSError if the folder or the file cannot be created.
        """
        for last in (False, False, True):
            self._made = _make(self.folder)
            try:
                if not self._create():
                    self._take_over(say)
                break
            except (
                FileNotFoundError
            ):  # its owner has just released it, and removed the lock and the empty folder
                self._remove_folders()
                if last:
                    raise
            except BaseException:
                self._remove_folders()
                raise
        self._thread = threading.Thread(target=self._keep_alive, name="run lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise OSError if another run has taken over the folder. Recreate a deleted lock."""
        now = _read(self.path)
        if now is None and self._create():
            return
        if not self._is_ours(now):
            raise OSError(f"another run has taken over {str(self.folder)!r}: {_holder(now or {})}")

    def release(self) -> None:
        """Release the lock, and remove folders that `take` created and that are empty."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            try:
                if self._is_ours(_read(self.path)):
                    self.path.unlink(missing_ok=True)
            except OSError as error:
                warnings.warn(
                    f"the lock {str(self.path)!r} cannot be removed ({in_words(error)}).", stacklevel=2
                )
            self._remove_folders()

    # ------------------------------------------------------------------------------------------------------ the file

    def _create(self) -> bool:
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            os.pwrite(handle, self._content(), 0)
            os.fsync(handle)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
        return True

    def _write(self) -> None:
        handle = os.open(self.path, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0))
        try:
            os.pwrite(handle, self._content(), 0)
            os.fsync(handle)
        finally:
            os.close(handle)

    def _content(self) -> bytes:
        return json.dumps(self._record).encode().ljust(_SIZE - 1) + b"\n"

    def _take_over(self, say: Callable[[str], None]) -> None:
        """Take over an existing lock, if no run holds it."""
        content, reason = _read(self.path), ""
        while not reason:
            if content is None:
                if self._create():
                    return
                content = self._watch(None)
            elif self._owner_lives_here(content):
                self._refuse(content)
            elif not (reason := self._takeover_reason(content)):
                say(
                    f"{str(self.path)!r} is another run's ({_holder(content)}): waiting up to {self._stale:.0f} s to see"
                    " whether it lives"
                )
                now = self._watch(content)
                if now and now != content and now.get("owner") == content.get("owner"):
                    self._refuse(now)
                if now == content:
                    reason = f"it was not renewed for {self._stale:.0f} s"
                content = now
        assert content is not None
        if (now := _read(self.path)) != content:
            self._refuse(now or {})
        self._write()
        time.sleep(_SETTLE_S)  # if two runs take over at once, the later one wins
        if not self._is_ours(now := _read(self.path)):
            self._refuse(now or {})
        say(f"took over the lock of {_holder(content)}: {reason}")

    def _is_ours(self, content: dict[str, Any] | None) -> bool:
        return content is not None and content["owner"] == self._record["owner"]

    def _refuse(self, holder: dict[str, Any]) -> None:
        raise LockHeld(
            f"{self.option}={str(self.folder)!r} is in use by another run: {_holder(holder)}. Wait for it, stop it, or"
            f" give another {self.option}. If it has surely ended, delete {str(self.path)!r}.",
            _holder(holder),
        )

    def _watch(self, content: dict[str, Any] | None) -> dict[str, Any] | None:
        """The lock's content once it changes; `found` if it stays the same until it is stale."""
        deadline = time.monotonic() + self._stale
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._stale / 20))
            now = _read(self.path)
            if now != content:
                return now
        return content

    def _takeover_reason(self, content: dict[str, Any]) -> str:
        """The reason to take over a lock without waiting; '' if there is none."""
        if content.get("job") and content["job"] == self._record["job"]:
            return "it is of this very job"
        if self._is_of_here(content) and _process(content["pid"]) != content["process"]:
            return "its process has ended"
        return ""

    def _owner_lives_here(self, content: dict[str, Any]) -> bool:
        """Whether a lock's owner is a living process of this machine, which SLURM is not about to end.

        torchrun ends its ranks before it starts others: a living one belongs to another torchrun with the same
        --rdzv-id.
        """
        being_ended = content.get("job") == self._record["job"] and self._record["job"].startswith(_OF_SLURM)
        return (
            self._is_of_here(content) and _process(content["pid"]) == content["process"] and not being_ended
        )

    def _is_of_here(self, content: dict[str, Any]) -> bool:
        return _same_machine(self._record["process"], content)

    # --------------------------------------------------------------------------------------------------- renewal

    def _keep_alive(self) -> None:
        warned = False
        while not self._ended.wait(self._beat):
            try:
                self.check()
                self._record["beats"] += 1
                self._write()
            except OSError as error:
                if not warned:
                    warnings.warn(
                        f"the lock {str(self.path)!r} is not renewed ({in_words(error)}).", stacklevel=1
                    )
                warned = True

    def _remove_folders(self) -> None:
        for folder in reversed(self._made):
            try:
                folder.rmdir()
            except OSError:  # not empty
                return


def surely_ended(path: Path) -> bool:
    """Whether a lock's owner was a process of this machine and container that has ended."""
    content = _read(path)
    return (
        content is not None
        and _same_machine(_process(os.getpid()), content)
        and _process(content["pid"]) != content["process"]
    )


def _same_machine(own_process: dict[str, str] | None, content: dict[str, Any]) -> bool:
    """Whether a lock's process entry refers to processes that are visible here."""
    owner_process = content.get("process")
    return (
        own_process is not None
        and isinstance(owner_process, dict)
        and owner_process.get("machine") == own_process["machine"]
        and "pid" in content
    )


def job_name(environ: Mapping[str, str]) -> str:
    """An identifier that a restart shares with the run before it: SLURM job or torchrun; '' if there is neither."""
    if environ.get("SLURM_JOB_ID"):
        cluster = environ.get("SLURM_CLUSTER_NAME", "this cluster")
        return f"{_OF_SLURM}{environ['SLURM_JOB_ID'][:_NAME]} of {cluster[:_NAME]}"
    if "TORCHELASTIC_RUN_ID" not in environ:
        return ""
    if environ["TORCHELASTIC_RUN_ID"] != "none":
        return f"torchrun {environ['TORCHELASTIC_RUN_ID'][:_NAME]}"
    parent = _process(os.getppid()) or {}
    return f"torchrun {os.getppid()} on {socket.gethostname()}, started at {parent.get('started', '?')}"


def _process(pid: int) -> dict[str, str] | None:
    """A unique identity of a living process, on any machine; None if it has ended, or without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else {"machine": machine, "started": fields[19]}


def _read(path: Path) -> dict[str, Any] | None:
    """A lock's content; None if there is no lock; {"owner": None} if it is invalid."""
    for pause in (0.0, 0.05, 0.2):  # another process may be writing it
        time.sleep(pause)
        try:
            content = load_json(read_ordinary(path, 2 * _SIZE)[:_SIZE])
        except FileNotFoundError:
            if path.is_symlink():
                raise OSError(f"{str(path)!r} is a link to nothing: remove it") from None
            return None
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        except ValueError:
            continue
        if isinstance(content, dict) and "owner" in content:
            return content
    return {"owner": None}


def _holder(holder: dict[str, Any]) -> str:
    if not holder.get("host"):
        return "a process that did not leave its name"
    job = f" ({holder['job']})" if holder.get("job") else ""
    return f"process {holder.get('pid')} on {holder['host']}{job}, since {holder.get('since')}"


def _make(folder: Path) -> list[Path]:
    """Create a folder and its parents; return the created ones, from the top."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]
