"""The plan of an import: each checkpoint tensor, made on request from the directory's.

The conversion is lossless: BF16 weights stay BF16; other formats, and FP8 and NVFP4 codes times their scales, become
float32. Several ranks share the work: each reads, makes and writes its own tensors only. If one rank fails, all
ranks fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..files.atomic_io import files_not_visible
from ..numerics.formats import E2M1, E4M3
from ..params.block_codes import is_scales_key, scales_key
from ..state.collectives import broadcast_value, first_rank_with
from .architectures import Entry
from .block_scales import block_scales
from .directory import Tensors, name_write_errors, new_directory
from .qkv_layout import heads_of, interleave, join_qkv, megatron_shape, pad_rows
from .weight_decoder import read_weight, scale_name


class ImportPlan:
    """A checkpoint's tensors, made from a directory's.

    Attributes:
        described: name -> meta tensor with shape and dtype, in forward order.
        kept_scales: number of FP8 weights with stored scales.
        lost: block-FP8 weights without stored scales -> reason.

    Args:
        halves: the directory's latent heads rotate the first half against the second.

    Raises ValueError naming a tensor of an unsupported type.
    """

    def __init__(self, tensors: Tensors, listed: list[Entry], section: dict[str, Any], halves: bool) -> None:
        self._tensors, self._section, self._halves = tensors, section, halves
        self._entries: dict[str, Entry] = {}
        self.described: dict[str, torch.Tensor] = {}
        self.kept_scales = 0
        self.lost: dict[str, str] = {}
        for entry in listed:
            if not entry.copy:
                self._describe(entry)

    def _describe(self, entry: Entry) -> None:
        shape = megatron_shape(entry, self._section)
        if entry.vocabulary:
            shape[0] = self._section["padded_vocab_size"]
        found = {_dtype(name, self._tensors) for name in entry.parts}
        dtype = torch.bfloat16 if found == {torch.bfloat16} else torch.float32
        self._entries[entry.megatron] = entry
        self.described[entry.megatron] = torch.empty(shape, dtype=dtype, device="meta")
        scales, lost = self._scales(entry)
        self.lost |= lost
        if scales is not None:
            key = scales_key(entry.megatron)
            self._entries[key] = entry
            self.described[key] = scales.to("meta")
            self.kept_scales += len(entry.parts)

    def parameters(self) -> int:
        """Number of values of all weights, including the vocabulary's padding."""
        return sum(tensor.numel() for name, tensor in self.described.items() if not is_scales_key(name))

    def make(self, name: str) -> torch.Tensor:
        """The tensor of that name. Raises ValueError if it is not finite, or its scales fit no format."""
        entry = self._entries[name]
        if not is_scales_key(name):
            return self._weight(entry)
        scales, _ = self._scales(entry)
        assert scales is not None, name
        return scales

    def _scales(self, entry: Entry) -> tuple[torch.Tensor | None, dict[str, str]]:
        return block_scales(entry, self._tensors, self._section, moved=self._halves and entry.turned)

    def _weight(self, entry: Entry) -> torch.Tensor:
        parts = [high_precision(name, self._tensors) for name in entry.parts]
        if entry.qkv:
            dtype = self.described[entry.megatron].dtype
            query, key, value = (part.to(dtype) for part in parts)
            parts = [join_qkv(query, key, value, heads_of(self._section))]
        (tensor,) = parts
        if self._halves and entry.turned:
            heads = self._section["num_attention_heads"] if entry.shape[0] == "queries" else 1
            tensor = interleave(tensor, heads, self._section["qk_pos_emb_head_dim"])
        return pad_rows(tensor, self._section["padded_vocab_size"]) if entry.vocabulary else tensor


def _dtype(name: str, tensors: Tensors) -> torch.dtype:
    """Dtype of the converted tensor: bfloat16 if stored so, else float32."""
    stored, scaled = tensors.dtype(name), scale_name(name, tensors.names()) is not None
    if scaled and stored not in (E4M3.dtype, E2M1.dtype):
        raise ValueError(f"{name} is {stored} with a scale: float8_e4m3fn can be imported.")
    if not scaled and stored not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{name} is {stored} without a scale: it cannot be imported.")
    return torch.bfloat16 if stored == torch.bfloat16 else torch.float32


def high_precision(name: str, tensors: Tensors) -> torch.Tensor:
    """The tensor, decoded without loss: bfloat16 if stored so, else float32; FP8 and NVFP4 as code times scales.

    Raises ValueError naming it: its type is unsupported, or it is not finite.
    """
    _dtype(name, tensors)
    scaled = scale_name(name, tensors.names()) is not None
    tensor = read_weight(name, tensors) if scaled else tensors[name]
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} holds NaN or Inf: the file is damaged, or training diverged.")
    return tensor if tensor.dtype == torch.bfloat16 else tensor.float()


T = TypeVar("T")

_PATIENCE_S = 60.0
"""How long network file systems may hide another machine's file."""
_REFUSED = "refused"


class Sharing:
    """All ranks of the process group, or this process without one. Every method is collective.

    Args:
        store: the group's, used to signal failure; None: a single process.
    """

    def __init__(self, store: dist.Store | None = None) -> None:
        self._store = store
        self.rank, self.size = (0, 1) if store is None else (dist.get_rank(), dist.get_world_size())

    def each(self, work: Callable[[], T]) -> T:
        """Result of `work()` on this rank. Raises ValueError or OSError on all ranks if any rank failed."""
        done: list[T] = []
        failed: ValueError | OSError | None = None
        try:
            done.append(work())
        except (ValueError, OSError) as error:
            failed = error
        if (found := first_rank_with(failed)) is not None:
            raise found[1] if failed is None else failed
        return done[0]

    def first(self, work: Callable[[], T]) -> T:
        """Result of `work()` on the first rank; other ranks wait. Raises as `each`."""
        found = self.each(lambda: work() if self.rank == 0 else None)
        return broadcast_value(0, found)

    def part(self, listed: list[Entry], tensors: Tensors) -> list[Entry]:
        """This rank's entries to make, in order, with about the same number of bytes on every rank.

        They are consecutive, as in the directory's files, so each file is read by one rank or a few
        neighbours.
        """
        made = [entry for entry in listed if not entry.copy]
        sizes = [sum(_stored_bytes(name, tensors) for name in entry.parts) for entry in made]
        all_bytes, before, mine = sum(sizes), 0, []
        for entry, size in zip(made, sizes, strict=True):
            middle = 2 * before + size  # position of the middle, in half bytes
            if middle * self.size // (2 * all_bytes) == self.rank:
                mine.append(entry)
            before += size
        return mine

    def until_one_refuses(self, work: Callable[[str], T]) -> Callable[[str], T]:
        """Wraps `work` so that it raises ValueError after a failure on another rank, which avoids hours of wasted
        work."""
        store = self._store
        if store is None:
            return work

        def watched(name: str) -> T:
            if store.check([_REFUSED]):
                raise ValueError(store.get(_REFUSED).decode())
            try:
                return work(name)
            except (ValueError, OSError) as error:
                store.compare_set(_REFUSED, "", str(error))
                raise

        return watched

    @contextmanager
    def new_directory(self, path: Path) -> Iterator[Path]:
        """`directory.new_directory` on the first rank, for all: it becomes visible when every rank's block has
        succeeded."""
        with ExitStack() as stack:
            folder = self.first(lambda: stack.enter_context(new_directory(path)))
            with name_write_errors(path):
                yield folder
            self.first(stack.pop_all().close)

    def see(self, file: Path) -> None:
        """Raises ValueError on all ranks if one of them does not see the first rank's file."""
        size = self.first(lambda: file.stat().st_size)

        def look() -> None:
            if files_not_visible(file.parent, {file.name: size}, _PATIENCE_S):
                raise ValueError(
                    f"rank {self.rank} does not see {str(file.parent)!r}, which rank 0 has made: give a RUN_DIR on a file"
                    " system that all nodes have under the same path."
                )

        self.each(look)


def _stored_bytes(name: str, tensors: Tensors) -> int:
    dtype = tensors.dtype(name)
    return prod(tensors.shape(name)) * (dtype.itemsize if isinstance(dtype, torch.dtype) else 1)
