"""Log files of ranks, and their output on the launcher's terminal.

    DIR/attempt0/rank3.stdout.log, rank3.stderr.log

On a terminal the first rank of this node writes its stdout directly, so that it can draw a progress bar; it then has no
stdout file. Lines are shown as they arrive. Only a line `error: ...` is delayed for some seconds: its rank is about to
end, and the error should be the last line, printed once, however many ranks print the same.
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
_TAIL_BYTES = 4096  # bytes at a log's end that are searched for its last line


class RankLogs(LogsSpecs):
    """The log files of all attempts on this node, and the reader that shows them.

    Args:
        folder: folder of the files.
        terminal: whether the first rank writes its stdout to the launcher's stdout.
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
        """The folder of all files."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the files of the next attempt, which `show` then reads. `envs`: local rank -> its environment."""
        self.show(ended=True)
        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        first = min(ranks.values())
        while (folder := self._folder / f"attempt{self._attempt}").exists() and list(
            folder.glob(f"rank{first}.*")
        ):
            self._attempt += 1
        folder.mkdir(parents=True, exist_ok=True)
        logs = LogsDest()
        self._followed, self._held, self._shown = [], {}, set()
        for local, rank in ranks.items():
            for stream, paths in (("stdout", logs.stdouts), ("stderr", logs.stderrs)):
                path = folder / f"rank{rank}.{stream}.log"
                if self._terminal and local == 0 and stream == "stdout":
                    paths[local] = ""
                    continue
                paths[local] = str(path)
                path.touch()
                self._followed.append(_Followed(rank, stream, path))
            logs.error_files[local] = str(folder / f"rank{rank}.error.json")
            envs[local]["TORCHELASTIC_ERROR_FILE"] = logs.error_files[local]
        return logs

    def show(self, *, ended: bool = False) -> None:
        """Print the ranks' output since the last call; `ended`: the ranks have ended, so print errors without delay."""
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
        """Remove and return the errors that were not printed yet, each once."""
        pending = list(self._held)
        self._held = {}
        self._shown.update(pending)
        return pending

    @property
    def said_errors(self) -> bool:
        """Whether an error of the last attempt was printed."""
        return bool(self._shown)

    def last_line(self, rank: int) -> tuple[str, Path | None]:
        """Last line of a rank in the last attempt ('' if none), and its file (None if it has no file)."""
        files = [file for file in self._followed if file.rank == rank]
        if not files:
            return "", None
        latest = max(files, key=lambda file: (bool(file.end()), file.changed()))
        # The cause of an end is on stderr. Buffered stdout may reach its file at the same moment.
        near = [file for file in files if file.end() and latest.changed() - file.changed() < _MOMENT_S]
        chosen = next((file for file in near if file.stream == "stderr"), latest)
        return chosen.end(), chosen.path


class _Followed:
    """Reads a rank's log file as it grows."""

    def __init__(self, rank: int, stream: str, path: Path) -> None:
        self.rank, self.stream, self.path = rank, stream, path
        self._file: BinaryIO = path.open("rb")
        self._rest = b""

    def lines(self, ended: bool) -> list[str]:
        """New lines since the last call, with line ends; `ended`: an incomplete last line too."""
        lines: list[bytes] = []
        while more := self._file.read(_CHUNK):
            *whole, self._rest = (self._rest + more).splitlines(keepends=True) or [b""]
            if self._rest.endswith((b"\n", b"\r")):
                whole, self._rest = [*whole, self._rest], b""
            lines += whole
        if ended and self._rest:
            lines, self._rest = [*lines, self._rest + b"\n"], b""
        return [line.decode(errors="replace") for line in lines]

    def end(self) -> str:
        """The last line that is not empty; '' if there is none."""
        with self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - _TAIL_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")

    def changed(self) -> float:
        """Time of the last write, in seconds since 1970."""
        return self.path.stat().st_mtime

    def close(self) -> None:
        self._file.close()
