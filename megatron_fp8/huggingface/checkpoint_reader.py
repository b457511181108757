"""The checkpoint of an export: tensors, the run's config, an imported directory's metadata.

The metadata is in the manifest. It exists if tensors and scales alone do not suffice to restore the
directory's bytes in fp8-block, and only in imported checkpoints, not in those of training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ..files.atomic_io import as_value_error
from ..files.checkpoint import (
    check_files,
    find_checkpoint,
    missing_checksum_note,
    read_manifest,
    read_metadata,
    read_tensor,
)
from ..plan.overrides import check_overrides
from ..state.arena import is_slot_key
from ..state.guard import as_overrides
from ..train.config.model_fields import differences, kind_of
from ..train.resume.checkpoint_compat import IMPORTED
from ..train.run_record import later_training_note
from .architectures import Entry
from .directory import Tensors
from .weight_decoder import scale_name

FACT = IMPORTED

_FLOATS = {"float32": torch.float32, "float16": torch.float16}
_NAMED = 3  # names listed in a note


@dataclass(frozen=True)
class SourceMetadata:
    """Metadata that an export needs.

    Attributes:
        floats: checkpoint name of each tensor that was float32 or float16 -> that dtype.
        lost: FP8 weights without stored scales, by directory name -> reason.
    """

    floats: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)

    @property
    def was_in_blocks(self) -> bool:
        """Whether there is metadata, which only block-FP8 directories have."""
        return bool(self.floats or self.lost)

    def fact(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"floats": dict(self.floats), "lost": dict(self.lost)}

    def dtype(self, megatron: str) -> torch.dtype | None:
        """Original dtype of a checkpoint's tensor if it was float32 or float16."""
        return _FLOATS.get(self.floats.get(megatron, ""))

    def notes(self, listed: list[Entry]) -> list[str]:
        """Notes with the directory's names."""
        by_reason: dict[str, list[str]] = {}
        for name, why in self.lost.items():
            by_reason.setdefault(why, []).append(name)
        found = [
            f"scales of {len(names)} FP8 weight(s) are not kept ({first_names(names)}): {why}"
            for why, names in by_reason.items()
        ]
        floats = [entry.parts[0] for entry in listed if entry.megatron in self.floats and not entry.copy]
        if floats:
            found.append(
                f"{len(floats)} tensor(s) beside the FP8 weights are float32 or float16 ({first_names(floats)}):"
                " --format=fp8-block writes them as they came; training and other exports round them to the run's dtype"
            )
        return found


def first_names(names: Any) -> str:
    """The first few names, and the number of others."""
    listed = list(names)
    return ", ".join(listed[:_NAMED]) + (", ..." if len(listed) > _NAMED else "")


def source_metadata_of(fact: Any) -> SourceMetadata:
    """The metadata from a manifest; empty if it has none. Raises ValueError if malformed."""
    if fact is None:
        return SourceMetadata()
    parts: list[Any] = [fact.get(name) if isinstance(fact, dict) else None for name in ("floats", "lost")]
    texts = all(isinstance(part, dict) and all(isinstance(v, str) for v in part.values()) for part in parts)
    if not texts or not _FLOATS.keys() >= set(parts[0].values()):
        raise ValueError(f"its facts.{FACT} is not what an import writes: import the directory anew.")
    return SourceMetadata(*parts)


def floats_of(listed: list[Entry], tensors: Tensors) -> dict[str, str]:
    """``SourceMetadata.floats`` of a directory; empty unless it has block-FP8 weights. Excludes tensors that are always
    float32."""
    names = tensors.names()
    if not any(name.endswith("weight_scale_inv") for name in names):
        return {}
    found = {}
    for entry in listed:
        dtypes = {
            None if scale_name(part, names) else tensors.dtype(part) for part in entry.parts if part in names
        }
        if entry.copy or entry.as_stored or not dtypes <= {torch.bfloat16, *_FLOATS.values()}:
            continue
        if dtypes != {torch.bfloat16}:
            found[entry.megatron] = "float16" if dtypes == {torch.float16} else "float32"
    return found


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_NOT_MODEL = ("optimizer.", "rng.")


class WeightSource(Protocol):
    """The source of a plan's tensors, under Megatron-Core's names: a checkpoint, or a live model."""

    section: dict[str, Any]
    """The model section of a run."""
    origin: SourceMetadata

    @property
    def exact_weights(self) -> Set[str]:
        """Tensors whose float32 values are quantized without rounding to the model's dtype first."""

    @property
    def label(self) -> str:
        """What it is, for messages."""

    def weights(self) -> set[str]:
        """Names of the model's tensors."""

    def shape(self, name: str) -> list[int]:
        """The shape of a whole tensor."""

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """The dtype in which a tensor is stored; None: there is no such tensor."""

    def tensor(self, name: str, as_stored: bool = False) -> torch.Tensor:
        """A whole tensor, in the model's dtype or as stored."""


@dataclass
class Source:
    """A checkpoint to export.

    Attributes:
        section: the model section of its run.
        run: all known sections.
        metadata: torch_dist's.
        tokenizer: the run's, from the manifest (``Tokenizer.name``); None if unknown.
        notes: lines to print.
        origin: metadata of the imported directory, if the checkpoint is unchanged since.
    """

    folder: Path
    section: dict[str, Any]
    run: dict[str, Any]
    metadata: Any
    tokenizer: str | None
    notes: list[str]
    origin: SourceMetadata = field(default_factory=SourceMetadata)

    exact_weights = frozenset[str]()

    @property
    def label(self) -> str:
        """What it is, for messages."""
        return f"the checkpoint {str(self.folder)!r}"

    @property
    def dtype(self) -> torch.dtype:
        """The model's compute dtype."""
        return _DTYPES[self.section.get("params_dtype") or "bfloat16"]

    def weights(self) -> set[str]:
        """Names of the model's tensors."""
        return {
            name
            for name in self.metadata.state_dict_metadata
            if not name.startswith(_NOT_MODEL) and not is_slot_key(name)
        }

    def shape(self, name: str) -> list[int]:
        """The shape of a checkpoint's tensor."""
        return list(self.metadata.state_dict_metadata[name].size)

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """The dtype in which a tensor is stored; None: there is no such tensor."""
        stored = self.metadata.state_dict_metadata.get(name)
        return None if stored is None else stored.properties.dtype

    def tensor(self, name: str, as_stored: bool = False) -> torch.Tensor:
        """A whole tensor, in the model's dtype or as stored."""
        found = read_tensor(self.folder, self.metadata, name)
        return found if as_stored else found.to(self.dtype)


def open_source(path: Path, run: dict[str, Any] | None = None) -> Source:
    """The checkpoint at a path, after checking all its files.

    Args:
        run: sections of its run, if the checkpoint has none (it was saved from Python).

    Raises ValueError: not a checkpoint, damaged, of an unknown model, or inconsistent with `run`.
    """
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    own = manifest.facts.get("run", {})
    if not own.get("model") and not (run or {}).get("model"):
        raise ValueError(
            f"{str(folder)!r} does not say what model it is of: give its run's config with --config=FILE."
        )
    run = {**own, **_merged_sections(folder, own, run)} if run else own
    run = {name: part for name, part in run.items() if part is not None}
    if odd := next((name for name in ("train", "data") if not isinstance(run.get(name, {}), dict)), None):
        raise ValueError(
            f"the section {odd!r} of the run's config is {type(run[odd]).__name__}, and has to be keys with values: give"
            " the config.yaml of a run."
        )
    precision = manifest.facts.get("precision", {})  # has synonyms resolved
    names = ("params_dtype", "fp8", "fp8_recipe", "fp4", "fp4_recipe")
    settled = {name: precision[name] for name in names if name in precision}
    metadata = read_metadata(folder)
    section = {**run["model"], **settled}
    if section.get("fp8_guard"):
        section["fp8_overrides"] = {**as_overrides(manifest.state), **(section.get("fp8_overrides") or {})}
    _check_types(folder, section, len(metadata.state_dict_metadata))
    with as_value_error(f"the checkpoint {str(folder)!r} cannot be exported", errors=ValueError):
        origin = source_metadata_of(manifest.facts.get(FACT))
    notes = [*missing_checksum_note(manifest), *later_training_note(path, folder)]
    return Source(folder, section, run, metadata, manifest.facts.get("tokenizer"), notes, origin)


def _merged_sections(folder: Path, own: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A given config's sections merged over the checkpoint's own. Raises ValueError if they are of another model."""
    model = own.get("model", {})
    merged = {**model, **given["model"]}
    for name, (saved, new) in differences(model, merged, {}).items() if model else ():
        if kind_of(name) in ("shape", "function"):
            raise ValueError(
                f"the checkpoint {str(folder)!r} is of another model: model.{name} is {saved!r} there and {new!r} in the"
                " given config. Leave --config out: the checkpoint has its own."
            )
    return {**given, "model": merged}


_SIZES = ("num_layers", "hidden_size", "num_attention_heads")
_OTHER_SIZES = (
    "num_query_groups", "kv_channels", "ffn_hidden_size", "vocab_size", "padded_vocab_size", "num_moe_experts",
    "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_router_topk", "moe_router_num_groups",
    "moe_router_group_topk", "mtp_num_layers", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
    "v_head_dim",
)  # fmt: skip
_NUMBERS = ("layernorm_epsilon", "rotary_base", "rope_scaling_factor")


def _are_overrides(value: Any) -> bool:
    try:
        check_overrides(value, "")
    except ValueError:
        return False
    return True


def _check_types(folder: Path, section: dict[str, Any], tensors: int) -> None:
    """Raises ValueError unless sizes are integers and so on: a manifest may contain anything."""

    def require(name: str, holds: bool, words: str) -> None:
        if not holds:
            raise ValueError(
                f"the model of {str(folder)!r} has model.{name}={section.get(name)!r}: it must be {words}."
            )

    for name in (*_SIZES, *_OTHER_SIZES):
        value = section.get(name)
        is_integer = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        require(name, is_integer or (value is None and name in _OTHER_SIZES), "a whole number of at least 1")
    for name in ("num_layers", "num_moe_experts", "mtp_num_layers"):
        require(name, (section.get(name) or 0) <= tensors, f"at most the checkpoint's {tensors} tensors")
    frequency = section.get("moe_layer_freq", 1)
    listed = isinstance(frequency, list) and len(frequency) == section["num_layers"]
    is_integer = isinstance(frequency, int) and frequency >= 1
    require("moe_layer_freq", is_integer or listed, "a distance, or a list with a number for each layer")
    for name in _NUMBERS:
        value = section.get(name, 1)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        require(name, number and 0 < value < math.inf, "a number above 0")
    overrides = section.get("fp8_overrides") or {}
    require("fp8_overrides", _are_overrides(overrides), "names and recipes")
    require("params_dtype", section.get("params_dtype") in (None, *_DTYPES), f"one of {', '.join(_DTYPES)}")
