"""A checkpoint of this package, in any parallel layout, becomes a directory that transformers and vLLM read.

Tensors are read one by one, whole, from the files of the checkpoint: no ranks, no model, no Megatron-Core. Its weights
are high precision, rounded from the float32 masters, also where they lived as FP8: what is quantised here is what
training quantised, so the codes are the same (docs/export.md says for which layouts).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from ..calibration import Calibration
from ..checkpoint_files import check_files, find_checkpoint, read_manifest, read_metadata, read_tensor
from ..formats import E4M3
from ..plan import matching_override
from ..recipe import TENSOR, Rule
from ..scaling import compute_scale_inv
from ..train.tokenizers import Tokenizer, load_tokenizer
from .architectures import Entry, entries, gemms
from .config import exported_architecture, heads_of, hf_config, model_section
from .directory import (
    CONFIG,
    GENERATION,
    TOKENIZER_FILES,
    new_directory,
    read_json,
    write_json,
    write_tensors,
)
from .formats import FORMATS, WeightFormat, encode, quantization_config, weight_recipe
from .layout import split_qkv
from .shapes import megatron_shape

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_NOT_MODEL = ("optimizer.", "rng.")


@dataclass
class Source:
    """A checkpoint that is to be exported.

    Attributes:
        section: the model section of its run.
        run: all sections that are known.
        metadata: torch_dist's.
    """

    folder: Path
    section: dict[str, Any]
    run: dict[str, Any]
    metadata: Any

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return DTYPES[self.section.get("params_dtype") or "bfloat16"]

    def shape(self, name: str) -> list[int]:
        """Of a tensor of the checkpoint."""
        return list(self.metadata.state_dict_metadata[name].size)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, whole, in the model's dtype."""
        return read_tensor(self.folder, self.metadata, name).to(self.dtype)


@dataclass(frozen=True)
class Wanted:
    """What to write.

    Attributes:
        form: None for high precision, or how the linears of the layers become FP8.
        ignore: globs over Hugging Face's names of linears that stay in high precision.
        follow_training: linears that training kept in BF16 stay so too.
        calibration: ranges of inputs: static scales are written.
        like: a directory whose further config fields, generation config and tokenizer are taken over.
        vocab_size, positions: other than the run's.
        shard_bytes: the largest file.
    """

    form: WeightFormat | None = None
    ignore: tuple[str, ...] = ()
    follow_training: bool = True
    calibration: Calibration | None = None
    like: Path | None = None
    vocab_size: int | None = None
    positions: int | None = None
    shard_bytes: int = 5_000_000_000


@dataclass
class Exported:
    """What was written: the config, the files with tensors, and how many linears are FP8 and how many are not."""

    config: dict[str, Any]
    files: list[str]
    quantised: int
    kept: list[str]


def open_source(path: Path, run: dict[str, Any] | None = None) -> Source:
    """The checkpoint that a path means, every file of it checked.

    Args:
        run: the sections of its run, where the checkpoint itself does not say (it was saved from Python).

    Raises ValueError: it is no checkpoint, damaged, or says nothing about its model.
    """
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    run = run or manifest.facts.get("run")
    if not run or not run.get("model"):
        raise ValueError(
            f"{str(folder)!r} does not say what model it is of: give its run's config with --config=FILE."
        )
    precision = manifest.facts.get("precision", {})  # two names for one thing are resolved there
    settled = {name: precision[name] for name in ("params_dtype", "fp8", "fp8_recipe") if name in precision}
    return Source(folder, {**run["model"], **settled}, run, read_metadata(folder))


def export(
    source: Source, out: Path, wanted: Wanted, progress: Callable[[Iterator[Any], int], Iterator[Any]]
) -> Exported:
    """Write `source` into the new directory `out`.

    Args:
        progress: (items, how many) -> the same items, shown while they pass.

    Raises ValueError, and leaves nothing behind: no known family computes what the model does, a tensor is missing, left
    over or of another shape, a glob matches nothing, or the directory is there already.
    """
    architecture = exported_architecture(source.section)
    tied = bool(source.section.get("share_embeddings_and_output_weights"))
    listed = list(entries(architecture, source.section["num_layers"], tied))
    config, like = _config(source, wanted)
    _check_tensors(source, listed, config["vocab_size"])
    kept = _kept_linears(source.section, wanted) if wanted.form else set()
    with new_directory(out) as folder:
        parts = _parts(source, listed, config["vocab_size"])
        if wanted.form:
            config["quantization_config"] = quantization_config(
                wanted.form,
                ["lm_head", *sorted(kept, key=_by_layer)],
                static_inputs=wanted.calibration is not None,
            )
            parts = _quantised(parts, source.section, kept, wanted)
        files = write_tensors(folder, progress(parts, len(listed)), wanted.shard_bytes)
        write_json(folder / CONFIG, config)
        _write_companions(folder, source, config, like)
    linears = sum(map(len, gemms(source.section["num_layers"]).values()))
    return Exported(config, files, linears - len(kept) if wanted.form else 0, sorted(kept, key=_by_layer))


# -------------------------------------------------------------------------------------------------------------- config


def _config(source: Source, wanted: Wanted) -> tuple[dict[str, Any], Path | None]:
    """config.json, and the directory from which the rest comes."""
    section = source.section
    train = source.run.get("train", {})
    like = read_json(wanted.like / CONFIG) if wanted.like else {}
    like.pop("quantization_config", None)
    tokenizer = None if like else _tokenizer(source)
    vocab = wanted.vocab_size or like.get("vocab_size") or section.get("vocab_size")
    if vocab is None and tokenizer is not None:
        vocab = tokenizer.vocab_size
    positions = wanted.positions or like.get("max_position_embeddings") or train.get("seq_length")
    if vocab is None or positions is None:
        missing = "--vocab-size" if vocab is None else "--max-position-embeddings"
        raise ValueError(f"{str(source.folder)!r} does not say it: give {missing}=NUMBER.")
    ours = hf_config(section, int(vocab), int(positions))
    if like:
        _check_like(ours, like, wanted.like)
        like.pop("dtype", None)  # newer files have it for torch_dtype
    elif tokenizer is not None:
        ours["eos_token_id"] = tokenizer.eod
    return {**like, **ours, "torch_dtype": str(source.dtype).removeprefix("torch.")}, wanted.like


def _check_like(ours: dict[str, Any], like: dict[str, Any], folder: Path | None) -> None:
    """ValueError if the directory is of a model that computes something else."""
    theirs = hf_config(model_section(like), like["vocab_size"], ours["max_position_embeddings"])
    for name, value in theirs.items():
        if ours[name] != value:
            raise ValueError(
                f"--like={str(folder)!r} is of another model: {name} is {value!r} there and {ours[name]!r} in the "
                "checkpoint."
            )


def _tokenizer(source: Source) -> Tokenizer | None:
    """The tokenizer of the run, if it is known; without a file it is bytes."""
    data = source.run.get("data")
    return None if data is None else load_tokenizer(data.get("tokenizer"))


def _write_companions(folder: Path, source: Source, config: dict[str, Any], like: Path | None) -> None:
    """Generation config and tokenizer: from the directory given, else the run's."""
    tokenizer = source.run.get("data", {}).get("tokenizer")
    home = like or (Path(tokenizer).parent if tokenizer else None)
    if like and (like / GENERATION).exists():
        shutil.copyfile(like / GENERATION, folder / GENERATION)
    else:
        names = ["bos_token_id", "eos_token_id"]
        special = {name: config[name] for name in names if name in config}
        write_json(folder / GENERATION, {"_from_model_config": True, **special})
    if tokenizer and not like:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
    for name in TOKENIZER_FILES if home else ():
        assert home is not None
        if (home / name).exists() and not (folder / name).exists():
            shutil.copyfile(home / name, folder / name)


# ------------------------------------------------------------------------------------------------------------- tensors


def _check_tensors(source: Source, listed: list[Entry], vocab_size: int) -> None:
    """ValueError unless the checkpoint has the model's tensors, all of them, no others, in the config's shapes."""
    stored = {
        name
        for name in source.metadata.state_dict_metadata
        if not name.startswith(_NOT_MODEL) and ".fp8_state." not in name
    }
    section = {**source.section, "vocab_size": vocab_size}
    wanted = {entry.megatron for entry in listed}
    for names, words in (
        (wanted - stored, "has no"),
        (stored - wanted, "has, and the exported model has not,"),
    ):
        if names:
            raise ValueError(f"the checkpoint {str(source.folder)!r} {words} {sorted(names)[0]}.")
    for entry in listed:
        have, expected = source.shape(entry.megatron), megatron_shape(entry, section)
        padded = entry.vocabulary and have[0] > expected[0] and have[1:] == expected[1:]
        if have != expected and not padded:
            raise ValueError(
                f"{entry.megatron} is {have} in {str(source.folder)!r}, and its config says {expected}."
            )


def _parts(source: Source, listed: list[Entry], vocab_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face's tensors in high precision, in order."""
    heads = heads_of(source.section)
    for entry in listed:
        tensor = source.tensor(entry.megatron)
        if entry.vocabulary:
            tensor = tensor[:vocab_size]
        parts = split_qkv(tensor, heads) if entry.qkv else (tensor,)
        yield from zip(entry.parts, parts, strict=True)


def _quantised(
    parts: Iterator[tuple[str, torch.Tensor]], section: dict[str, Any], kept: set[str], wanted: Wanted
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with FP8 codes and scales in place of the linears' weights, GEMM by GEMM."""
    assert wanted.form is not None
    recipe = weight_recipe(wanted.form, section)
    sites = {
        f"{part}.weight": (site, names)
        for site, names in gemms(section["num_layers"]).items()
        for part in names
    }
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in parts:
        if name not in sites or name.removesuffix(".weight") in kept:
            yield name, tensor
            continue
        waiting[name] = tensor
        site, names = sites[name]
        if len(waiting) < len(names):  # its other parts come next
            continue
        yield from encode(waiting, wanted.form, recipe).items()
        if wanted.calibration is not None:
            scale = _input_scale(wanted.calibration, site)
            yield from ((f"{part}.input_scale", scale.clone()) for part in names)
        waiting = {}
    assert not waiting, list(waiting)


def _input_scale(calibration: Calibration, site: str) -> torch.Tensor:
    """float32 [1] by which codes of a site's input are multiplied. ValueError if it was not calibrated."""
    if f"{site}.input" not in calibration.ranges:
        raise ValueError(f"the calibration has no {site}.input: calibrate the checkpoint that is exported.")
    return compute_scale_inv(calibration.scale(site, Rule(E4M3, TENSOR))).reshape(1)


# ------------------------------------------------------------------------------------------- what stays high precision


def _kept_linears(section: dict[str, Any], wanted: Wanted) -> set[str]:
    """Linears of the layers that are not quantised: what the user names, and what training kept in BF16.

    Raises ValueError: a glob matches nothing, or only a part of what an inference engine fuses.
    """
    sites = gemms(section["num_layers"])
    kept: set[str] = set()
    for glob in wanted.ignore:
        found = {part for parts in sites.values() for part in parts if fnmatchcase(part, glob)}
        if not found and not fnmatchcase("lm_head", glob):
            first = next(iter(sites.values()))[0]
            raise ValueError(f"--ignore={glob!r} matches no linear: they have names such as {first}.")
        kept |= found
    for parts in sites.values():
        left = [part for part in parts if part not in kept]
        if left and len(left) < len(parts):
            raise ValueError(
                f"--ignore leaves {left[0]} in FP8 and not {next(p for p in parts if p in kept)}: they are one GEMM, "
                "and must be ignored together."
            )
    if wanted.follow_training and section.get("fp8"):
        for site, parts in sites.items():
            if _was_bf16(site, section):
                kept.update(parts)
    if len(kept) == sum(map(len, sites.values())):
        raise ValueError("every linear would stay in high precision: give --format=bf16, or --quantize-all.")
    return kept


def _was_bf16(site: str, section: dict[str, Any]) -> bool:
    """Whether a linear ran in BF16 in training: by its name, or as one of the first and last layers."""
    override = matching_override(site, section.get("fp8_overrides") or {})
    if override is not None:
        return override[1] == "bf16"
    if not section.get("first_last_layers_bf16"):
        return False
    layer, layers = int(site.split(".")[2]), section["num_layers"]
    first, last = (section.get(f"num_layers_at_{end}_in_bf16", 1) for end in ("start", "end"))
    return bool(layer < first or layer >= layers - last)


def _by_layer(name: str) -> tuple[int, str]:
    return int(name.split(".")[2]), name


def format_named(name: str) -> WeightFormat | None:
    """The format of the command line's name; None for 'bf16' (the model's own dtype)."""
    return None if name == "bf16" else FORMATS[name]
