"""One thread for all of gloo's groups in a process.

torch gives every gloo group a device of its own, whose thread looks at its sockets a hundred times a second, used or not.
Megatron-Core makes thirty groups a rank: a sixth of a small training's CPU time. Groups can share a device: gloo keeps
connections apart by themselves.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d


@functools.cache  # once a process, since a device's thread does not survive a fork
def share_device() -> None:
    """From now on, all gloo groups of this process have one device; call it after a fork. Nothing where the user names
    the network's interfaces."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    group: Any = _distributed_c10d.ProcessGroupGloo
    device = functools.cache(group.create_default_device)
    original = group.__init__

    def with_shared_device(
        self: Any, store: Any, rank: int, size: int, *options: Any, timeout: timedelta | None = None
    ) -> None:
        if timeout is not None:
            made = group._Options()
            made._timeout, made._devices = timeout, [device()]
            options = (made,)
        original(self, store, rank, size, *options)

    group.__init__ = with_shared_device
