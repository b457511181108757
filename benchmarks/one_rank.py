"""This process as Megatron-Core's only rank, for benchmarks that train or decode its models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def one_rank(backend: str = "gloo") -> Iterator[None]:
    """Inside, Megatron-Core is installed and its groups are there, by `backend`; groups that were there stay."""
    from megatron_fp8 import mcore

    mcore.install()
    if dist.is_initialized():
        yield
        return
    from megatron.core import parallel_state

    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
