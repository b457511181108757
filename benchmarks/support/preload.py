"""What fork_server.py imports and makes before it forks: nothing that starts a thread or installs a hook."""

import atexit
import gc
import os
import sys
import warnings
from contextlib import nullcontext

import torch

from megatron_fp8.mcore.patches.missing_packages import plain_functions

# As mcore.install() does; device_count() asks NVML: CUDA itself, once asked, works in no forked process.
with warnings.catch_warnings(), nullcontext() if torch.cuda.device_count() else plain_functions():
    warnings.simplefilter("ignore")  # of each command and rank, its own imports would warn
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    import megatron_fp8.commands.train
    import megatron_fp8.mcore.spec
    import megatron_fp8.train.loop
    import megatron_fp8.train.model  # noqa: F401
    from megatron_fp8.mcore.patches import cpu_engine
    from megatron_fp8.train.config.run_config import parse

    # Torch reads the source of all frames for the names in its records: half a second for each launch.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    cpu_engine.factories()  # kept too: 20 ms
    parse([])  # the parser of options is kept: each command would make it in 0.2 s


def _leave() -> None:
    """The server's own end: Triton's bindings would print pages about objects that are still referenced."""
    os._exit(0)


atexit.register(_leave)
os.register_at_fork(after_in_child=lambda: atexit.unregister(_leave))
gc.collect()
gc.freeze()  # a collection in a child would otherwise write to, and so copy, every page of these modules
