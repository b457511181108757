"""What forked.py imports before it forks: only imports, nothing that starts a thread or installs a hook."""

import atexit
import gc
import os
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of each command and rank, its own imports would warn
    import megatron_fp8.commands.train
    import megatron_fp8.train.loop  # noqa: F401


def _leave() -> None:
    """The server's own end: Triton's bindings would print pages about objects that are still referenced."""
    os._exit(0)


atexit.register(_leave)
os.register_at_fork(after_in_child=lambda: atexit.unregister(_leave))
gc.collect()
gc.freeze()  # a collection in a child would otherwise write to, and so copy, every page of these modules
