"""What ranks say: into a file each, and from there to whoever watches.

    DIR/attempt0/rank3.stdout.log, rank3.stderr.log

On a terminal the first rank of this node writes its stdout there itself, so that it can draw a bar; that has no file.
Lines are shown as they come. Only a line `error: ...` is held back for some seconds: a rank that says so is about to
end, and it is to be the last line, said once, however many ranks say the same.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

_ERROR = "error: "
_HELD_S = 5.0
_MOMENT_S = 1.0
_CHUNK = 1 << 20
_QUOTED = 4096  # bytes at the end of a log, among which its last line is looked for


class RankLogs(LogsSpecs):
    """The files of all attempts on this node, and the reader that shows them.

    Args:
        folder: where they are made.
        terminal: whether the first rank's stdout is the launcher's own.
    """

    def __init__(self, folder: Path, *, terminal: bool) -> None:
        super().__init__(str(folder))
        self._folder, self._terminal = folder, terminal
        self._attempt = 0
        self._followed: list[_Followed] = []
        self._held: dict[str, float] = {}
        self._shown: set[str] = set()

    @property
    def root_log_dir(self) -> str:
        """Where all files are."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of the next attempt, which `show` reads from now on. `envs`: local rank -> its variables."""
        self.show(ended=True)
        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        first = min(ranks.values())
        while (folder := self._folder / f"attempt{self._attempt}").exists() and list(
            folder.glob(f"rank{first}.*")
        ):
            self._attempt += 1
        folder.mkdir(parents=True, exist_ok=True)
        found = LogsDest()
        self._followed, self._held, self._shown = [], {}, set()
        for local, rank in ranks.items():
            for stream, paths in (("stdout", found.stdouts), ("stderr", found.stderrs)):
                path = folder / f"rank{rank}.{stream}.log"
                if self._terminal and local == 0 and stream == "stdout":
                    paths[local] = ""
                    continue
                paths[local] = str(path)
                path.touch()
                self._followed.append(_Followed(rank, stream, path))
            found.error_files[local] = str(folder / f"rank{rank}.error.json")
            envs[local]["TORCHELASTIC_ERROR_FILE"] = found.error_files[local]
        return found

    def show(self, *, ended: bool = False) -> None:
        """Print what ranks have said since the last call; `ended`: they say no more, and errors are held no longer."""
        now = time.monotonic()
        for file in self._followed:
            for line in file.lines(ended):
                if file.stream == "stderr" and line.startswith(_ERROR):
                    if line.strip() not in self._shown:
                        self._held.setdefault(line.strip(), now)
                else:
                    print(line, end="", file=getattr(sys, file.stream), flush=True)
        for line, since in list(self._held.items()):
            if ended or now - since > _HELD_S:
                print(line, file=sys.stderr, flush=True)
                self._shown.add(line)
                del self._held[line]
        if ended:
            for file in self._followed:
                file.close()
            self._followed = []

    def errors(self) -> list[str]:
        """Take the errors that ranks have said and nobody was shown, each once."""
        found = list(self._held)
        self._held = {}
        self._shown.update(found)
        return found

    @property
    def said_errors(self) -> bool:
        """Whether an error of the last attempt was shown."""
        return bool(self._shown)

    def last_line(self, rank: int) -> tuple[str, Path | None]:
        """What a rank of the last attempt said last ('': nothing), and the file that has it (None: nobody kept it)."""
        files = [file for file in self._followed if file.rank == rank]
        if not files:
            return "", None
        latest = max(files, key=lambda file: (bool(file.end()), file.changed()))
        # What ends a process is said on stderr; what it had printed may reach its file in the same moment.
        near = [file for file in files if file.end() and latest.changed() - file.changed() < _MOMENT_S]
        chosen = next((file for file in near if file.stream == "stderr"), latest)
        return chosen.end(), chosen.path


class _Followed:
    """A rank's file, read as it grows."""

    def __init__(self, rank: int, stream: str, path: Path) -> None:
        self.rank, self.stream, self.path = rank, stream, path
        self._file: BinaryIO = path.open("rb")
        self._rest = b""

    def lines(self, ended: bool) -> list[str]:
        """Those that came since the last call, with their ends; `ended`: an unfinished one too."""
        found: list[bytes] = []
        while more := self._file.read(_CHUNK):
            *whole, self._rest = (self._rest + more).splitlines(keepends=True) or [b""]
            if self._rest.endswith((b"\n", b"\r")):
                whole, self._rest = [*whole, self._rest], b""
            found += whole
        if ended and self._rest:
            found, self._rest = [*found, self._rest + b"\n"], b""
        return [line.decode(errors="replace") for line in found]

    def end(self) -> str:
        """Its last line that is not empty; ''."""
        with self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - _QUOTED))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")

    def changed(self) -> float:
        """When it was written to, in seconds since 1970."""
        return self.path.stat().st_mtime

    def close(self) -> None:
        self._file.close()
