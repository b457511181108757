"""What it means when a collective fails: another rank is gone, or does not answer."""

from __future__ import annotations

import re
from pathlib import Path

import torch.distributed as dist

from ..files.resource_limits import limit_reached
from .failure import TrainingFailed
from .stacks import place_of_error

_OF_PEERS = re.compile(
    r"gloo/transport|Connection (closed|reset|refused)|Broken pipe|Timed out|timed out|timeout|remote process"
)


def lost_rank(error: BaseException, doing: str, who: str, saved: Path | None) -> TrainingFailed | None:
    """What an error of a collective means, when it is that another rank is gone or does not answer; else None.

    Args:
        doing: what this rank was doing, such as 'iteration 12'.
        who: which ranks differ, if somebody has looked; else ''.
        saved: the newest checkpoint.
    """
    what = _what(error)
    if what is None:
        return None
    who = who or "it has ended, or its node is gone: its log, or torchrun and srun, say why"
    back = f"goes on from {saved}" if saved else "starts from the beginning, since there is no checkpoint"
    return TrainingFailed(f"training failed: {doing}: {what}: {who}. --resume=auto {back}.")


def lost_before_training(error: BaseException) -> TrainingFailed | None:
    """The same of an error before the first step, of whose ranks the lines of the meeting have told."""
    what = _what(error)
    if what is None:
        return None
    return TrainingFailed(
        f"before the first step {what}: one is stopped, hangs or has ended, as the lines above or its log say."
    )


def _what(error: BaseException) -> str | None:
    if not isinstance(error, (RuntimeError, dist.DistError)) or not _OF_PEERS.search(str(error)):
        return None
    if limit_reached(error):  # of this process: gloo's own sockets are files too
        return None
    place = place_of_error(error.__traceback__)
    if place is None or place.kind != "waits":
        return None
    (line, *_) = str(error).splitlines()
    cause = re.sub(r"^\[[^]]*\] *", "", line).split(". ")[0]
    late = re.search("[Tt]imed out|timeout", cause)
    what = "other ranks did not come in time" if late else "the connection to another rank was lost"
    return f"{what} ({cause}, in {place.text})"
