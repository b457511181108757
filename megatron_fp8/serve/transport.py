"""A weight stream to other processes: broadcast, shared memory, or CUDA IPC.

All three send buckets: a header, with names, dtypes and shapes as JSON, and the tensors' bytes one after the other. The
receiver yields views of the bucket. A view is valid until a tensor of the next bucket is asked for: copy what must stay.

    broadcast        a group of torch.distributed; GPUs to GPUs over NCCL, CPUs over gloo
    shared memory    two processes of one machine, over the CPU
    CUDA IPC         two processes on one GPU, without a copy for the receiver
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..state.collectives import device_of

_ALIGNED = 16  # bytes; every dtype's views start at multiples of its size
Stream = Iterable[tuple[str, torch.Tensor]]


class Bucket:
    """The places of tensors in a buffer of bytes.

    Args:
        tensors: (name, dtype, shape) of each, in order.
    """

    def __init__(self, tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> None:
        self.tensors = [(name, dtype, tuple(shape)) for name, dtype, shape in tensors]
        self._starts, self.bytes = [], 0
        for _, dtype, shape in self.tensors:
            self._starts.append(self.bytes)
            self.bytes += -(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors as views of a buffer, uint8 [at least ``bytes``]."""
        return [
            buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, (_, dtype, shape) in zip(self._starts, self.tensors, strict=True)
        ]

    def named(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, view) of each tensor."""
        return zip((name for name, _, _ in self.tensors), self.views(buffer), strict=True)

    def header(self) -> bytes:
        """Names, dtypes and shapes, for ``read_header``."""
        return json.dumps(
            [(name, str(dtype).removeprefix("torch."), shape) for name, dtype, shape in self.tensors]
        ).encode()


def read_header(content: bytes) -> Bucket:
    """The bucket of a header. Raises ValueError for a name that is no dtype of torch."""
    found = []
    for name, word, shape in json.loads(content):
        dtype = getattr(torch, word, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has the dtype {word!r}, which torch does not have.")
        found.append((name, dtype, shape))
    return Bucket(found)


@dataclass
class _Filled:
    """A bucket and its tensors."""

    bucket: Bucket
    tensors: list[torch.Tensor]

    def fill(self, buffer: torch.Tensor) -> None:
        for view, tensor in zip(self.bucket.views(buffer), self.tensors, strict=True):
            view.copy_(tensor)


def _buckets(stream: Stream, bucket_bytes: int) -> Iterator[_Filled]:
    """The stream in buckets of at most ``bucket_bytes``, or one tensor."""
    named: list[tuple[str, torch.Tensor]] = []
    total = 0
    for name, tensor in stream:
        if named and total + tensor.nbytes + _ALIGNED > bucket_bytes:
            yield _filled(named)
            named, total = [], 0
        named.append((name, tensor))
        total += tensor.nbytes + _ALIGNED
    if named:
        yield _filled(named)


def _filled(named: list[tuple[str, torch.Tensor]]) -> _Filled:
    return _Filled(Bucket([(name, t.dtype, t.shape) for name, t in named]), [tensor for _, tensor in named])


# ------------------------------------------------------------------------------------------------------------ broadcast


def broadcast(stream: Stream, bucket_bytes: int, source: int = 0, group: Any = None) -> None:
    """Sends a stream to the group's other ranks, which call ``receive_broadcast``.

    Args:
        source: this rank, numbered in the group.
    """
    device, root = device_of(group), _global(source, group)
    for filled in _buckets(stream, bucket_bytes):
        header = filled.bucket.header()
        _send_length(len(header), device, root, group)
        content = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)
        dist.broadcast(content, src=root, group=group)
        buffer = torch.empty(filled.bucket.bytes, dtype=torch.uint8, device=device)
        filled.fill(buffer)
        dist.broadcast(buffer, src=root, group=group)
    _send_length(0, device, root, group)


def receive_broadcast(source: int = 0, group: Any = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the (name, tensor) that the rank ``source`` of the group sends by ``broadcast``."""
    device, root = device_of(group), _global(source, group)
    while length := _send_length(0, device, root, group):
        content = torch.empty(length, dtype=torch.uint8, device=device)
        dist.broadcast(content, src=root, group=group)
        bucket = read_header(content.cpu().numpy().tobytes())
        buffer = torch.empty(bucket.bytes, dtype=torch.uint8, device=device)
        dist.broadcast(buffer, src=root, group=group)
        yield from bucket.named(buffer)


def _global(rank: int, group: Any) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _send_length(length: int, device: torch.device, root: int, group: Any) -> int:
    """The length of the next header, from the sender; 0 after the last."""
    number = torch.tensor([length], dtype=torch.int64, device=device)
    dist.broadcast(number, src=root, group=group)
    return int(number)


# -------------------------------------------------------------------------------------------------------- shared memory

_MEMORY = Path("/dev/shm")  # Linux's shared memory


def send_shared_memory(stream: Stream, bucket_bytes: int, connection: Connection) -> None:
    """Sends a stream to a process of the same machine, which calls ``receive_shared_memory`` on the connection's other
    end. One block serves all buckets that fit into it; each waits until the receiver has read the last.

    Raises ValueError: the machine has no shared memory, or too little. EOFError: the receiver has ended.
    """
    block: torch.Tensor | None = None
    for filled in _buckets(stream, bucket_bytes):
        size = filled.bucket.bytes
        if block is None or len(block) < size:
            block = _new_block(max(size, bucket_bytes), connection)
        filled.fill(block)
        connection.send_bytes(filled.bucket.header())
        connection.recv_bytes()
    connection.send_bytes(b"")


def _new_block(size: int, connection: Connection) -> torch.Tensor:
    """Shared memory, uint8 [size], that the receiver has mapped; its name is removed, so it ends with both processes."""
    try:
        handle, path = tempfile.mkstemp(prefix="megatron_fp8-", dir=_MEMORY)
    except OSError as error:
        raise ValueError(f"{_MEMORY} cannot be used ({error}): use broadcast.") from error
    try:
        os.posix_fallocate(handle, 0, size)  # a mapping without memory behind it would end the process
        block = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        connection.send_bytes(json.dumps({"path": path, "size": size}).encode())
        connection.recv_bytes()
    except ConnectionError:
        raise
    except OSError as error:
        raise ValueError(
            f"{_MEMORY} has no {size:,} bytes ({error}): give a smaller bucket_bytes, or more shared memory."
        ) from error
    finally:
        os.close(handle)
        os.unlink(path)
    return block


def receive_shared_memory(connection: Connection) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the (name, tensor) that the process at the connection's other end sends by ``send_shared_memory``.

    Raises EOFError: the sender has ended.
    """
    block = torch.empty(0, dtype=torch.uint8, device="cpu")
    while content := connection.recv_bytes():
        if content.startswith(b"{"):
            place = json.loads(content)
            block = torch.from_file(place["path"], shared=True, size=place["size"], dtype=torch.uint8)
            connection.send_bytes(b"mapped")
            continue
        yield from read_header(content).named(block)
        connection.send_bytes(b"read")


# ------------------------------------------------------------------------------------------------------------- CUDA IPC


def send_cuda_ipc(stream: Stream, bucket_bytes: int, connection: Connection) -> None:
    """Sends a stream to a process on the same GPU, which calls ``receive_cuda_ipc`` on the connection's other end.

    Written from torch.multiprocessing's sources and not run on a GPU. Handles are pickled: both ends must be trusted.

    Raises ValueError for a tensor that is not on an NVIDIA GPU.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    for filled in _buckets(stream, bucket_bytes):
        device = filled.tensors[0].device
        if device.type != "cuda":
            raise ValueError(
                f"{filled.bucket.tensors[0][0]} is on {device}, and CUDA IPC hands over memory of NVIDIA GPUs: use shared"
                " memory or broadcast."
            )
        buffer = torch.empty(filled.bucket.bytes, dtype=torch.uint8, device=device)
        filled.fill(buffer)
        torch.cuda.synchronize(device)  # the receiver's stream does not wait for this one
        connection.send((filled.bucket.header(), reduce_tensor(buffer)))
        connection.recv_bytes()
        del buffer
        torch.cuda.ipc_collect()
    connection.send(None)


def receive_cuda_ipc(connection: Connection) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the (name, tensor) that the process at the connection's other end sends by ``send_cuda_ipc``: views of its
    memory, which it frees when the next bucket is asked for."""
    while (sent := connection.recv()) is not None:
        header, (rebuild, arguments) = sent
        buffer = rebuild(*arguments)
        yield from read_header(header).named(buffer)
        torch.cuda.synchronize(buffer.device)
        del buffer
        connection.send_bytes(b"read")
