"""File lock that gives a folder to one run, on any file system, with takeovers.

    .lock    filelock's marker (process, host, a random token), then two lines of this module: machine and job

filelock creates the marker, renews its time every few seconds, and takes it over from an ended process of this host.
That takeover needs a rename that exchanges two files, which NFS and Lustre lack, and filelock knows no jobs. So this
module decides, too: a run takes over a lock at once if its owner has certainly ended or belongs to the same job: the
same SLURM job (requeued, or a step of it restarted), the same torchrun, or an ended process of this machine. Otherwise
it watches the marker: while its time advances, the lock is held; after a minute without a renewal, it is stale. This
machine's own clock measures that minute, so the clocks of two machines need not agree.

An owner that was wrongly considered dead (suspended for minutes, or cut off from the file system) finds another token
in the file before its next write: `check` raises.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
from filelock import SoftFileLease, Timeout

from .atomic_io import error_text, open_regular
from .terminal import warn_user

LOCK = ".lock"
STALE_S = 60.0
"""Seconds without a renewal until a lock is stale, as long as NFS caches a file. It is renewed twelve times as often."""
_SETTLE_S = 0.3
"""Seconds to wait after a takeover: another run may take over at the same moment."""
_OF_SLURM = "SLURM job "
_NAME = 100
"""Longest part of a given name in characters: filelock reads 1,024 bytes of a marker."""


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
        stale: seconds, as STALE_S.
    """

    def __init__(
        self, folder: Path, option: str, *, environ: Mapping[str, str] = os.environ, stale: float = STALE_S
    ) -> None:
        self.folder, self.option = folder, option
        # Absolute: the renewing thread must not write elsewhere if the program changes its working directory.
        self.path = folder.absolute() / LOCK
        self._job, self._stale = job_name(environ), stale
        self._lease = SoftFileLease(
            self.path,
            lease_duration=stale,
            heartbeat_interval=stale / 12,
            on_compromise=self._renew,
            thread_local=False,
        )
        self._released = threading.Event()
        self._token: str | None = None
        self._made: list[Path] = []

    def take(self, say: Callable[[str], None]) -> None:
        """Create the folder and lock it.

        Args:
            say: prints a line about a wait or a takeover.

        Raises LockHeld if another run has the lock; OSError if the folder or the file cannot be created.
        """
        self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            owner, reason = _read(self.path), "its process has ended"
            if not self._create():
                owner = _read(self.path)
                reason = self._takeover_reason(owner, say)
                self._lease.force_break()
                if not self._create():
                    self._refuse(_read(self.path))
            if owner and reason:
                time.sleep(_SETTLE_S)  # if two runs take over at once, the later one wins
                if not self._is_ours(now := _read(self.path)):
                    self._refuse(now)
                say(f"took over the lock of {_description(owner)}: {reason}")
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Raise OSError if another run has taken over the folder, or if the lock was deleted."""
        if not self._is_ours(owner := _read(self.path)):
            who = f": {_description(owner)}" if owner else ", or its lock was deleted"
            raise OSError(f"another run has taken over {str(self.folder)!r}{who}")

    def release(self) -> None:
        """Release the lock, and remove folders that `take` created and that are empty."""
        self._released.set()
        try:
            self._lease.release()
        except OSError as error:
            warn_user(f"the lock {str(self.path)!r} cannot be removed ({error_text(error)}).")
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:  # not empty
                break
        self._made = []

    def _create(self) -> bool:
        """Create the file, or take it over from an ended process of this host; False if there is another one."""
        try:
            self._lease.acquire(blocking=False)
        except Timeout:
            return False
        self._token = self._lease.token
        self._released.clear()
        with self.path.open("a", encoding="ascii") as stream:
            stream.write(f"machine={_machine()}\njob={self._job}\n")
        return True

    def _renew(self, _: object) -> None:
        """Renew the lock where filelock's thread gives up, after a minute of errors of the file system."""
        warn_user(f"the lock {str(self.path)!r} could not be renewed; it is tried on.")
        while not self._released.wait(self._stale / 12):
            try:
                owner = _read(self.path)
                if self._is_ours(owner):
                    os.utime(self.path)
                elif owner is not None:
                    return  # another run's: the next `check` raises
            except OSError:
                continue  # the file system may come back

    def _takeover_reason(self, owner: dict[str, str] | None, say: Callable[[str], None]) -> str:
        """The reason to take over a lock, after a wait if needed; '' if it was released. Raises LockHeld."""
        if owner is None:
            return ""
        here = bool(_machine()) and owner.get("machine") == _machine() and owner.get("pid", "").isdecimal()
        if here and not psutil.pid_exists(int(owner["pid"])):
            return "its process has ended"
        # torchrun ends its ranks before it starts others: a living one is of another torchrun with the same --rdzv-id.
        if self._job and owner.get("job") == self._job and (self._job.startswith(_OF_SLURM) or not here):
            return "it is of this very job"
        if here:
            self._refuse(owner)
        say(
            f"{str(self.path)!r} is another run's ({_description(owner)}): waiting up to {self._stale:.0f} s to see"
            " whether it lives"
        )
        deadline = time.monotonic() + self._stale
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._stale / 20))
            now = _read(self.path)
            if now is None:
                return ""
            if now != owner:
                self._refuse(now)
        return f"it was not renewed for {self._stale:.0f} s"

    def _is_ours(self, owner: dict[str, str] | None) -> bool:
        return owner is not None and self._token is not None and owner.get("token") == self._token

    def _refuse(self, owner: dict[str, str] | None) -> None:
        who = _description(owner or {})
        raise LockHeld(
            f"{self.option}={str(self.folder)!r} is in use by another run: {who}. Wait for it, stop it, or give another"
            f" {self.option}. If it has surely ended, delete {str(self.path)!r}.",
            who,
        )


def job_name(environ: Mapping[str, str]) -> str:
    """An identifier that a restart shares with the run before it: SLURM job or torchrun; '' if there is neither."""
    if environ.get("SLURM_JOB_ID"):
        cluster = environ.get("SLURM_CLUSTER_NAME", "this cluster")
        return f"{_OF_SLURM}{_short(environ['SLURM_JOB_ID'])} of {_short(cluster)}"
    if "TORCHELASTIC_RUN_ID" not in environ:
        return ""
    if environ["TORCHELASTIC_RUN_ID"] != "none":
        return f"torchrun {_short(environ['TORCHELASTIC_RUN_ID'])}"
    try:
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "?"
    return f"torchrun {os.getppid()} on {socket.gethostname()}, started at {started}"


def _short(name: str) -> str:
    return re.sub("[^ -~]", "?", name[:_NAME])


def _machine() -> str:
    """Identifies the processes that are visible here; '' without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _read(path: Path) -> dict[str, str] | None:
    """The fields of a lock, and when it was renewed; None if there is no lock. Opening it asks the server of a file."""
    try:
        with open_regular(path, 1 << 20) as stream:
            status, content = os.fstat(stream.fileno()), stream.read().decode(errors="replace")
    except FileNotFoundError:
        return None
    fields = [line.partition("=") for line in content.splitlines() if "=" in line]
    renewed = f"{status.st_ino} {status.st_mtime_ns}"
    return {**{name: value for name, _, value in fields}, "renewed": renewed}


def _description(owner: dict[str, str]) -> str:
    if not owner.get("host") or not owner.get("pid", "").isdecimal():
        return "a process that did not leave its name"
    job = f" ({owner['job']})" if owner.get("job") else ""
    return f"process {owner['pid']} on {owner['host'].partition('?')[0]}{job}"
