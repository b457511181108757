"""Live models, as a plan of Hugging Face tensors reads them.

A Megatron-Core model is gathered from all ranks, whatever its tensor, pipeline and expert parallelism, in buckets: every
rank gets each whole tensor once. A bucket is one broadcast from each rank that has a part of it.

    bytes alive    the bucket's whole tensors, one rank's part of them, and what the plan makes of one GEMM

Rejected: an all-gather over the tensor-parallel group and a broadcast over the pipeline's, as Megatron-Bridge does. Names
and shapes would need rules for each kind of layer; a checkpoint's pieces have them already.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..huggingface.architectures import HEAD, Entry, entries, gemms
from ..huggingface.checkpoint_reader import SourceMetadata
from ..huggingface.config import exported_architecture, model_section
from ..huggingface.qkv_layout import heads_of, join_qkv
from ..inference.calibration import Calibration
from ..nn.linear import Fp8Layer
from ..params.fp8_tensor_base import Fp8TensorBase
from ..recipe import Recipe
from ..state.collectives import size, union
from .adapters import PlainModel, whole_tensor
from .transport import Bucket

if TYPE_CHECKING:
    from ..mcore.checkpoint.live_weights import Piece

_GPT = ("position_embedding_type", "rotary_percent", "rotary_base", "share_embeddings_and_output_weights")


def megatron_section(model: Any, guard: Any = None) -> dict[str, Any]:
    """The model section of a run that has this GPTModel, with plain values.

    Args:
        guard: of its FP8 state; its moves become overrides.
    """
    from ..train.config.model_section import ACTIVATIONS  # loads Megatron-Core

    config = model.config
    section = {field.name: getattr(config, field.name, None) for field in dataclasses.fields(config)}
    section |= {name: getattr(model, name) for name in _GPT}
    functions = {function: name for name, function in ACTIVATIONS.items()}
    section["activation_func"] = functions.get(config.activation_func, config.activation_func)
    section["vocab_size"] = model.vocab_size
    if guard is not None:
        section["fp8_overrides"] = {
            **{move.site: move.to for move in guard.moves.values()},
            **(section.get("fp8_overrides") or {}),
        }
    return {name: value.value if isinstance(value, Enum) else value for name, value in section.items()}


class MegatronSource:
    """A live Megatron-Core model on all ranks. Collective: every rank reads the same tensors, in forward order.

    Args:
        chunks: this rank's model chunks.
        bucket_bytes: bytes of tensors gathered at a time; one tensor at least.
    """

    label = "the model"
    origin = SourceMetadata()
    exact_weights = frozenset[str]()

    def __init__(self, chunks: list[Any], bucket_bytes: int) -> None:
        from ..mcore.checkpoint.live_weights import LiveWeights
        from ..mcore.runtime import state_of, unwrap

        model = unwrap(chunks[0])
        self.section = megatron_section(model, state_of(model.config).guard)
        self.dtype: torch.dtype = model.config.params_dtype
        self._bucket_bytes = bucket_bytes
        self._weights = LiveWeights(chunks)
        self._rank, self._ranks = (dist.get_rank() if size(None) > 1 else 0), size(None)
        mine = {(piece.name, piece.offset): (piece, self._rank) for piece in self._weights.pieces()}
        self._pieces: dict[str, list[tuple[Piece, int]]] = {}
        for piece, rank in union(mine).values():
            self._pieces.setdefault(piece.name, []).append((piece, rank))
        architecture = exported_architecture(self.section)
        self._order = [entry.megatron for entry in entries(architecture, self.section)]
        self._next = 0
        self._held: dict[str, torch.Tensor] = {}

    def weights(self) -> set[str]:
        """Names of the model's tensors."""
        return set(self._pieces)

    def shape(self, name: str) -> list[int]:
        """The shape of a whole tensor."""
        return list(self._pieces[name][0][0].whole)

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """The dtype in which a tensor is stored; None: there is no such tensor."""
        return self._pieces[name][0][0].dtype if name in self._pieces else None

    def tensor(self, name: str, as_stored: bool = False) -> torch.Tensor:
        """A whole tensor, in the model's dtype or as stored."""
        assert self._order[self._next] == name, (name, self._order[self._next])
        if name not in self._held:
            self._gather(self._coming())
        self._next += 1
        found = self._held.pop(name)
        return found if as_stored else found.to(self.dtype)

    def _coming(self) -> list[str]:
        """The next tensors to read, as many as fit into a bucket."""
        names: dict[str, None] = {}
        total = 0
        for name in self._order[self._next :]:
            piece = self._pieces[name][0][0]
            total += 0 if name in names else prod(piece.whole) * piece.dtype.itemsize
            if names and total > self._bucket_bytes:
                break
            names[name] = None
        return list(names)

    def _gather(self, names: list[str]) -> None:
        """Fills ``_held`` with whole tensors, from the ranks that have their pieces."""
        by_rank: dict[int, list[Piece]] = {}
        for name in names:
            for piece, rank in self._pieces[name]:
                by_rank.setdefault(rank, []).append(piece)
        held, device = {}, self._weights.device
        for rank, pieces in sorted(by_rank.items()):
            bucket = Bucket([(piece.name, piece.dtype, piece.shape) for piece in pieces])
            flat = torch.empty(bucket.bytes, dtype=torch.uint8, device=device)
            if rank == self._rank:
                for piece, target in zip(pieces, bucket.views(flat), strict=True):
                    target.copy_(self._weights.read(piece))
            if self._ranks > 1:
                dist.broadcast(flat, src=rank)
            for piece, values in zip(pieces, bucket.views(flat), strict=True):
                if piece.name not in held:
                    held[piece.name] = torch.empty(piece.whole, dtype=piece.dtype, device=device)
                window = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
                held[piece.name][window] = values
            del flat
        self._held |= held


class ConvertedSource:
    """A model of transformers after convert_to_fp8, also one that FSDP shards or PEFT wraps. Collective if sharded.

    Args:
        model: with its config, and parameters under the names of its directory. Active adapters are merged.

    Raises ValueError: another family, an adapter that is not LoRA or DoRA, a computed parameter, or an output head that
    is the embedding by the config alone.
    """

    label = "the model"
    origin = SourceMetadata()

    def __init__(self, model: Any) -> None:
        self._plain = plain = PlainModel.of(model)
        model = plain.model
        to_dict = getattr(getattr(model, "config", None), "to_dict", None)
        if to_dict is None:
            raise ValueError(
                f"{type(model).__name__} has no config of transformers: give a Megatron-Core model, or a model of"
                " transformers."
            )
        self.model, self.family = model, _plain_class(model).__name__
        described = {**to_dict(), "architectures": [self.family]}
        for name in ("quantization_config", "auto_map"):
            described.pop(name, None)
        self.section = model_section(described)
        self._tensors = plain.parameters()
        if self.section["share_embeddings_and_output_weights"] and HEAD.parts[0] in self._tensors:
            raise ValueError(
                f"{HEAD.parts[0]} is not the embedding's weight, and tie_word_embeddings=True in the config: an adapter"
                " changed or replaced one of the two (modules_to_save, or LoRA of lm_head), and readers of the config"
                " would drop the head. Set model.config.tie_word_embeddings = False, to write both; or train one weight,"
                " by LoraConfig(ensure_weight_tying=True) with modules_to_save."
            )
        self._entries: dict[str, Entry] = {}
        listed = list(entries(exported_architecture(self.section), self.section))
        for entry in listed:
            if all(part in self._tensors for part in entry.parts):
                self._entries.setdefault(entry.megatron, entry)
        self._rest = self._tensors.keys() - {part for e in self._entries.values() for part in e.parts}
        self.dtype = next(t.dtype for t in self._tensors.values() if t.is_floating_point())
        linears = {name: module for name, module in plain.modules.items() if isinstance(module, Fp8Layer)}
        self.recipe: Recipe | None = next((m.fp8_config.resolved_recipe for m in linears.values()), None)
        self._linears, self._gemms = linears, gemms(listed)
        in_bf16 = [site for site, parts in self._gemms.items() if not all(part in linears for part in parts)]
        if linears:
            self.section |= {"fp8": "hybrid", "fp8_overrides": dict.fromkeys(in_bf16, "bf16")}
        self.exact_weights = {
            entry.megatron
            for entry in listed
            if any(
                part.removesuffix(".weight") in plain.adapted
                or isinstance(self._tensors.get(part), Fp8TensorBase)
                or getattr(self._tensors.get(part), "dtype", None) == torch.float32
                for part in entry.parts
            )
        }

    def calibration_of_gemms(self, calibration: Calibration) -> Calibration:
        """The calibration, with the range of each GEMM's input: the largest of the model's linears that are its parts."""
        ranges = dict(calibration.ranges)
        for site, parts in self._gemms.items():
            names = [self._linears[part].fp8_site.plan.name for part in parts if part in self._linears]
            found = [ranges[f"{name}.input"] for name in names if f"{name}.input" in ranges]
            if len(found) == len(parts):
                largest = max(found, key=lambda each: each.amax)
                shape = sum(each.shape[0] for each in found), largest.shape[1]
                ranges[f"{site}.input"] = dataclasses.replace(largest, shape=shape)
        return Calibration(ranges, calibration.facts)

    def weights(self) -> set[str]:
        """Names of the model's tensors."""
        return {*self._entries, *self._rest}

    def shape(self, name: str) -> list[int]:
        """The shape of a whole tensor."""
        shapes = [self._tensors[part].shape for part in self._entries[name].parts]
        return [sum(shape[0] for shape in shapes), *shapes[0][1:]]

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """The dtype in which a tensor is stored; None: there is no such tensor."""
        return self._tensors[self._entries[name].parts[0]].dtype if name in self._entries else None

    @torch.no_grad()
    def tensor(self, name: str, as_stored: bool = False) -> torch.Tensor:
        """A whole tensor, in the model's dtype or as stored."""
        entry = self._entries[name]
        parts = [self._value(part) for part in entry.parts]
        found = join_qkv(parts[0], parts[1], parts[2], heads_of(self.section)) if entry.qkv else parts[0]
        return found if as_stored else found.to(self.dtype)

    def _value(self, part: str) -> torch.Tensor:
        exact = self._plain.exact(part, self._tensors[part])
        return whole_tensor(self._tensors[part]) if exact is None else exact


def _plain_class(model: Any) -> type:
    """The class of transformers: conversion and FSDP make subclasses of it."""
    return next(c for c in type(model).__mro__ if c.__module__.startswith("transformers.") or c is object)
