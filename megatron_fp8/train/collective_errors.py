"""Explains a failed collective: another rank has ended or does not answer."""

from __future__ import annotations

import re
from pathlib import Path

import torch.distributed as dist

from ..files.resource_limits import limit_reached
from .failure import TrainingFailed
from .stack_dump import place_of_error

_PEER_ERRORS = re.compile(
    r"gloo/transport|Connection (closed|reset|refused)|Broken pipe|Timed out|timed out|timeout|remote process"
)


def lost_rank(error: BaseException, doing: str, who: str, saved: Path | None) -> TrainingFailed | None:
    """Explain an error of a collective that another rank caused, by its end or its silence; else None.

    Args:
        doing: this rank's phase, such as 'iteration 12'.
        who: which ranks differ, if the watchdog knows; else ''.
        saved: the newest checkpoint.
    """
    what = _peer_problem(error)
    if what is None:
        return None
    who = who or "it or its node has failed: its log, torchrun or srun have the cause"
    back = f"goes on from {saved}" if saved else "starts from the beginning, since there is no checkpoint"
    return TrainingFailed(f"training failed: {doing}: {what}: {who}. --resume=auto {back}.")


def lost_before_training(error: BaseException) -> TrainingFailed | None:
    """The same for an error before the first step, where earlier lines have named the ranks."""
    what = _peer_problem(error)
    if what is None:
        return None
    return TrainingFailed(
        f"before the first step {what}: one is stopped, hangs or has ended, as the lines above or its log say."
    )


def _peer_problem(error: BaseException) -> str | None:
    if not isinstance(error, (RuntimeError, dist.DistError)) or not _PEER_ERRORS.search(str(error)):
        return None
    if limit_reached(error):  # this process's own limit: gloo's sockets are files too
        return None
    place = place_of_error(error.__traceback__)
    if place is None or place.kind != "waits":
        return None
    (line, *_) = str(error).splitlines()
    cause = re.sub(r"^\[[^]]*\] *", "", line).split(". ")[0]
    late = re.search("[Tt]imed out|timeout", cause)
    problem = "other ranks did not come in time" if late else "the connection to another rank was lost"
    return f"{problem} ({cause}, in {place.text})"
