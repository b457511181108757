"""Imports a Hugging Face directory as a run for `megatron-fp8 train`.

    RUN_DIR/config.yaml                     the model section, and the tokenizer's path
    RUN_DIR/checkpoints/iter_0000000        weights only: training starts at iteration 0 with a fresh
        optimizer
    RUN_DIR/tokenizer.json, ...             copied, with generation_config.json: first and last token of a
        text

Tensors are read, converted and written one by one (import_plan.py), so memory holds a few times the largest
tensor, not the model. Several ranks share the tensors. A model that training cannot build fails first, before
terabytes are written, with config.json's names in the message. Training makes float32 masters from them,
and BF16 or FP8 weights from the masters.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from ..files.atomic_io import write_file
from ..files.checkpoint import Manifest
from ..numerics.formats import E2M1
from ..state.collectives import sum_over_ranks, union
from ..train.data.tokenizers import load_tokenizer
from .architectures import Architecture, Entry, entries, fused_rows, layers_of_experts
from .checkpoint_reader import FACT, SourceMetadata, first_names, floats_of
from .config import architecture_of, check_types, model_section
from .directory import (
    CONFIG,
    GENERATION,
    INDEX,
    TOKENIZER_FILES,
    Tensors,
    find_file,
    read_json,
    write_json,
)
from .import_plan import ImportPlan, Sharing, high_precision
from .moe import names_of_experts
from .qkv_layout import part_shapes
from .weight_decoder import (
    check_readable,
    dropped_scale_notes,
    fp4_weights,
    is_of_cache,
    is_scale,
    scale_name,
)

LONGEST_SEQUENCE = 4096
"""Largest sequence length in an imported run's config, even if the model supports more."""

TOKENIZER = "tokenizer.json"

Progress = Callable[[Iterable[str], int], Iterable[str]]
"""(items, count) -> the same items; shows progress during iteration."""

_HEAD = "lm_head.weight"

# Files of tokenizers in other formats.
_OTHER_TOKENIZERS = ("*.model", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt", "merges.txt")

# Redundant tensors in some files; they follow from the config.
_IGNORED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")


@dataclass
class ImportResult:
    """What was imported.

    Attributes:
        architecture: the family.
        parameters: count without padding.
        fp8_weights, fp4_weights: numbers of decoded FP8 and NVFP4 matrices.
        kept_scales: how many FP8 matrices have stored scales (params/block_codes.py).
        padding: padding rows of the vocabulary.
        notes: what of the directory was dropped.
    """

    architecture: str
    parameters: int
    fp8_weights: int
    fp4_weights: int
    kept_scales: int
    padding: int
    has_tokenizer: bool
    notes: list[str]


def import_directory(
    source: Path,
    run_dir: Path,
    progress: Progress,
    tokenizer: Path | None = None,
    sharing: Sharing | None = None,
) -> ImportResult:
    """Create the run `run_dir` from the directory `source`.

    Args:
        progress: shows the number of tensors written by this rank.
        tokenizer: a tokenizers file (tokenizer.json) to use instead of the directory's.
        sharing: the participating ranks; None: this process only.

    Raises ValueError, and leaves no files: the family or a field is unsupported; a tensor is missing,
    unexpected, of another shape or unsupported type, or not finite; `run_dir` exists.
    """
    sharing = sharing or Sharing()
    with ExitStack() as opened:
        config, section, tokenizer_file = sharing.each(lambda: _read_config(source, tokenizer))
        sharing.each(
            lambda: check_buildable(_run_config(config, section, False, run_dir), architecture_of(config))
        )
        tensors = sharing.each(lambda: _open_tensors(source, opened))
        folder = opened.enter_context(sharing.new_directory(run_dir))
        listed = sharing.each(lambda: check_entries(source, config, section, tensors))
        sharing.first(lambda: _check_copies(source, tensors, listed, section))
        halves = not config.get("rope_interleave", True)
        incoming = sharing.each(lambda: ImportPlan(tensors, sharing.part(listed, tensors), section, halves))
        run = _run_config(config, section, tokenizer_file is not None, run_dir)
        sharing.first(lambda: _write_other_files(folder, source, config, run, tokenizer_file))
        sharing.see(folder / "config.yaml")
        origin = SourceMetadata(floats_of(listed, tensors), union(incoming.lost))
        _save(folder, incoming, {"run": run, FACT: origin.fact()}, progress, sharing)
        parameters = sum_over_ranks(incoming.parameters())
        kept_scales = sum_over_ranks(incoming.kept_scales)
        names = tensors.names()
        quantized = [part for entry in listed for part in entry.parts if scale_name(part, names) is not None]
        fp4 = sum(tensors.dtype(part) == E2M1.dtype for part in quantized)
        notes = _notes(config, listed, tensors, origin)
    padding = section["padded_vocab_size"] - section["vocab_size"]
    tied = section["share_embeddings_and_output_weights"]
    without_padding = parameters - (1 if tied else 2) * padding * section["hidden_size"]
    name = architecture_of(config).name
    return ImportResult(
        name,
        without_padding,
        len(quantized) - fp4,
        fp4,
        kept_scales,
        padding,
        tokenizer_file is not None,
        notes,
    )


def _open_tensors(source: Path, opened: ExitStack) -> Tensors:
    tensors = opened.enter_context(Tensors(source))
    tensors.view_fp4(fp4_weights(tensors))
    return tensors


def _read_config(source: Path, tokenizer: Path | None) -> tuple[dict[str, Any], dict[str, Any], Path | None]:
    """(config.json, the equivalent model section, the tokenizer's file)."""
    config = read_json(source / CONFIG)
    section = model_section(config)
    check_readable(config)
    architecture = architecture_of(config)
    if architecture.fused and (config.get("quantization_config") or config.get("compression_config")):
        raise ValueError(
            f"config.json has a quantization_config, and {architecture.name} holds several matrices as one, whose scales"
            " are not taken apart here: import the model in BF16."
        )
    return config, section, tokenizer or find_tokenizer(source)


def check_entries(
    source: Path, config: dict[str, Any], section: dict[str, Any], tensors: Tensors
) -> list[Entry]:
    """All tensors of the model; checks that they exist with their shapes, without reading them. Completes the
    section."""
    architecture = architecture_of(config)
    _check_size(source, section, tensors)
    _drop_missing_mtp(section, tensors.names())
    listed = list(entries(architecture, section))
    shapes = {part: shape for entry in listed for part, shape in part_shapes(entry, section).items()}
    tensors.split_fused(fused_rows(architecture, shapes))
    _check_tensors(source, tensors, listed, section)
    return listed


def _write_other_files(
    folder: Path, source: Path, config: dict[str, Any], run: dict[str, Any], tokenizer: Path | None
) -> None:
    """Write the files besides tensors: config.yaml, and the tokenizer with its files."""
    write_file(folder / "config.yaml", yaml.safe_dump(run, sort_keys=False))
    for name in TOKENIZER_FILES:
        if file := find_file(source, name):
            shutil.copyfile(file, folder / name)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / TOKENIZER)
        write_json(folder / GENERATION, _special_ids(source, config))
        _check_tokenizer(folder, source, run["model"]["vocab_size"])


def _drop_missing_mtp(section: dict[str, Any], names: Set[str]) -> None:
    """Remove multi-token prediction from the section if the directory has no tensors for it, as in many copies."""
    if section.get("mtp_num_layers") and f"model.layers.{section['num_layers']}.eh_proj.weight" not in names:
        section["mtp_num_layers"] = None


def _check_size(source: Path, section: dict[str, Any], tensors: Tensors) -> None:
    """Raises ValueError, before anything is created per layer and expert, if there are fewer tensors than layers and
    experts need."""
    available = len(tensors.names())

    def check(what: str, least: int) -> None:
        if least > available:
            raise ValueError(f"config.json has {what}, and {str(source)!r} holds {available} tensors.")

    layers = section["num_layers"]
    check(f"num_hidden_layers={layers}", layers)  # first: other checks loop over layers
    experts, predicted = section.get("num_moe_experts") or 0, section.get("mtp_num_layers") or 0
    check(f"{experts} experts", experts * sum(layers_of_experts(section)))
    check(f"num_nextn_predict_layers={predicted}", predicted)


def _check_tensors(source: Path, tensors: Tensors, listed: list[Entry], section: dict[str, Any]) -> None:
    """Raises ValueError unless the directory has exactly the model's tensors, in the config's shapes."""
    names = tensors.names()
    expected = {part: shape for entry in listed for part, shape in part_shapes(entry, section).items()}
    copies = {entry.parts[0]: entry for entry in listed if entry.copy}
    if missing := sorted(set(expected) - set(copies) - names):
        raise ValueError(f"{str(source)!r} has no {missing[0]}, which its config.json asks for.")
    for name, file in sorted(tensors.unnamed.items()):
        if not (is_of_cache(name) or name.endswith(_IGNORED)):
            raise ValueError(
                f"{str(source / file)!r} has {name}, and its index does not say so: readers disagree about such a tensor."
                f" Take it out of the file, or correct {INDEX}."
            )
    for name in sorted(names - set(expected)):
        weight = f"{name.rpartition('.')[0]}.weight" if is_scale(name) else name
        tied = weight == _HEAD and section["share_embeddings_and_output_weights"]
        if not ((weight in expected) or tied or is_of_cache(name) or name.endswith(_IGNORED)):
            raise ValueError(f"{str(source)!r} has {name}, which its config.json does not ask for.")
    for name, shape in expected.items():
        if name in names and tensors.shape(name) != shape:
            raise ValueError(
                f"{name} is {tensors.shape(name)} in {str(source)!r}, and its config.json says {shape}."
            )


def _check_copies(source: Path, tensors: Tensors, listed: list[Entry], section: dict[str, Any]) -> None:
    """Raises ValueError unless duplicated tensors are equal, since Megatron-Core stores them once. Reads those
    tensors."""
    tied = section["share_embeddings_and_output_weights"] and _HEAD in tensors.names()
    if tied and not _are_equal(_HEAD, "model.embed_tokens.weight", tensors):
        raise ValueError(
            f"{str(source)!r} has a lm_head.weight other than its embedding, and tie_word_embeddings=true in its"
            " config.json: set that to false to import both, or remove the tensor."
        )
    first = {entry.megatron: entry.parts[0] for entry in listed if not entry.copy}
    for entry in listed:
        name, main = entry.parts[0], first[entry.megatron]
        if entry.copy and name in tensors.names() and not _are_equal(name, main, tensors):
            raise ValueError(
                f"{str(source)!r} has a {name} of its own, other than {main}: Megatron-Core shares it."
            )


def _are_equal(one: str, other: str, tensors: Tensors) -> bool:
    """Whether two tensors have the same values, whatever their storage formats."""
    pair = high_precision(one, tensors), high_precision(other, tensors)
    dtype = torch.promote_types(pair[0].dtype, pair[1].dtype)
    return torch.equal(pair[0].to(dtype), pair[1].to(dtype))


def _notes(
    config: dict[str, Any], listed: list[Entry], tensors: Tensors, origin: SourceMetadata
) -> list[str]:
    """Notes on what an export of the run will not reproduce from the directory."""
    found = [*origin.notes(listed), *dropped_scale_notes(config, tensors.names())]
    first = {entry.megatron: entry.parts[0] for entry in listed if not entry.copy}
    others = [
        entry.parts[0]
        for entry in listed
        if entry.copy
        and entry.parts[0] in tensors.names()
        and tensors.dtype(entry.parts[0]) != tensors.dtype(first[entry.megatron])
    ]
    if others:
        found.append(
            f"{len(others)} tensor(s) go out as what they are copies of, and are stored otherwise here"
            f" ({first_names(others)})"
        )
    if strays := tensors.strays:
        found.append(
            f"{len(strays)} file(s) of tensors are there and not read ({first_names(strays)}): no index names them"
        )
    return found


def _check_tokenizer(folder: Path, source: Path, vocab_size: int) -> None:
    """Raises ValueError unless the copied tokenizer and its files can be read and the model has all its tokens."""
    try:
        tokenizer = load_tokenizer(str(folder / TOKENIZER))
    except ValueError as error:  # the message must name the directory, not the copy
        raise ValueError(str(error).replace(str(folder), str(source))) from error
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{str(source)!r} has a tokenizer of {tokenizer.vocab_size} tokens (its end of text is"
            f" {tokenizer.eod}), and vocab_size={vocab_size} in its config.json: let transformers add rows,"
            " model.resize_token_embeddings(len(tokenizer)), and save both; or take those tokens out of tokenizer.json."
        )


def find_tokenizer(source: Path) -> Path | None:
    """The directory's tokenizers file; None if it has no tokenizer at all.

    Raises ValueError: its tokenizer has another format; without it a run would use bytes as tokens.
    """
    if file := find_file(source, TOKENIZER):
        return file
    others = sorted(path.name for pattern in _OTHER_TOKENIZERS for path in source.glob(pattern))
    if not others:
        return None
    raise ValueError(
        f"{str(source)!r} has {others[0]} and no {TOKENIZER}, which is the form that is read here. Let transformers write"
        f" it, AutoTokenizer.from_pretrained({str(source)!r}).save_pretrained(FOLDER), and give"
        f" --tokenizer=FOLDER/{TOKENIZER}."
    )


def _special_ids(source: Path, config: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json of the directory, or else the ids in its config.json."""
    found = read_json(source / GENERATION) if find_file(source, GENERATION) else {}
    check_types(found, GENERATION)
    id_names = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    return {name: value for name, value in (*id_names.items(), *found.items()) if value is not None}


def _run_config(
    config: dict[str, Any], section: dict[str, Any], has_tokenizer: bool, run_dir: Path
) -> dict[str, Any]:
    """config.yaml of the run; missing fields have their defaults."""
    positions = config.get("max_position_embeddings") or LONGEST_SEQUENCE
    run: dict[str, Any] = {"model": section, "train": {"seq_length": min(positions, LONGEST_SEQUENCE)}}
    if has_tokenizer:
        run["data"] = {"tokenizer": str(run_dir / TOKENIZER)}
    return {**run, "run_dir": str(run_dir)}


def _save(
    folder: Path, incoming: ImportPlan, facts: dict[str, Any], progress: Progress, sharing: Sharing
) -> None:
    """Write the weights as a checkpoint of iteration 0."""
    from ..mcore.checkpoint.saver import SaveError
    from ..mcore.checkpoint.weights import save_weights

    state = {
        "optimizer_step": 0,
        "fp8_iteration": 0,
        "loss_scaler": None,
        "scheduler_steps": 1,  # the scheduler is one step ahead of the optimizer
        "consumed_samples": 0,
    }
    shown = iter(progress(incoming.described, len(incoming.described)))
    make = sharing.until_one_refuses(incoming.make)

    def make_next(name: str) -> torch.Tensor:
        following = next(shown)
        assert following == name, (following, name)
        return make(name)

    try:
        save_weights(folder / "checkpoints", incoming.described, Manifest(0, state, facts), make_next)
        assert next(shown, None) is None, "all are written, and the bar is at its end"
    except SaveError as error:
        raise OSError(str(error).partition(". ")[0]) from error


# Names in a model section -> names in config.json, if different.
_NAMES = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "rope_scaling_factor": "factor",
    "rotary_scaling_factor": "factor",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "mtp_num_layers": "num_nextn_predict_layers",
}
# Remedies that change the config, which an existing model does not allow.
_REMEDY = re.compile(r"(: change it, or leave it \S+|\. Change one of them|: change one of them.*)\.$")


def check_buildable(run: dict[str, Any], architecture: Architecture) -> None:
    """Raises ValueError unless `megatron-fp8 train` accepts the run's config, as far as can be checked
    without data.

    Args:
        run: content of config.yaml.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, and those that training will repeat
            from ..train.config.model_section import transformer_config
            from ..train.config.run_config import parse

            transformer_config(parse([], base=run).model)
    except ValueError as error:
        message = _with_config_json_names(str(error), architecture)
        raise ValueError(
            f"config.json describes a model that Megatron-Core cannot build: {message}."
        ) from error


def _with_config_json_names(message: str, architecture: Architecture) -> str:
    names = {**_NAMES, **names_of_experts(architecture)}
    ours = "|".join(sorted(names, key=len, reverse=True))
    message = re.sub(rf"\b({ours})\b", lambda found: names[found[1]], _REMEDY.sub("", message))
    return message.replace("model.", "").rstrip(".")
