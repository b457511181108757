"""The store in which ranks find each other, when torchrun starts them again.

torchrun keeps one TCP store for its ranks and hands it to every attempt (torch 2.13, where a comment says that each
retry gets a new one). The first thing a rank does there is to read its peers' addresses, and after a restart it may find
those of ranks that are dead: gloo is refused the connection, or waits. So the keys of each attempt get their own prefix.

The attempt's number is only known on one node: with several, each torchrun counts the restarts that its own ranks caused.
There torchrun must be told not to share its store; the ranks then make one themselves, at a port of its own each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist


def check_restarts(environ: Mapping[str, str]) -> None:
    """Raise ValueError if torchrun may restart ranks of several nodes that would then meet the dead in its store."""
    shared = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if shared and environ.get("GROUP_WORLD_SIZE", "1") != "1" and restarts != "0":
        raise ValueError(
            f"torchrun with --max-restarts={restarts} on several nodes would give restarted ranks the addresses of dead "
            "ones: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started, with --rdzv-backend=c10d, or "
            "--max-restarts=0."
        )


def attempt_store(environ: Mapping[str, str], world_size: int, timeout: timedelta) -> dist.Store | None:
    """The store of this attempt's ranks; None: the one that init_process_group makes is as good."""
    if world_size == 1:  # needs no port, and so never meets another run on it
        return dist.HashStore()
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    return dist.PrefixStore(f"attempt {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
