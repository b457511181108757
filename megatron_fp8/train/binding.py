"""Compatibility of a checkpoint and the run that reads it.

The manifest holds the config of the run that saved it. A model section that would compute something else with the same
weights is refused, field by field (``model_fields`` says which), unless `--checkpoint.accept` names the field. So is
another tokenizer, which gives the ids another meaning. Changes that are allowed are told in one line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files.checkpoint import Manifest
from ..plan.settings import without_fp8_format
from .config.model_fields import differences, kind_of
from .config.model_section import ModelSection
from .config.run_config import RunConfig
from .data.tokenizers import BYTES
from .report import versions

# Sections (beside the model) whose changes are told, and the settings whose changes are not: they change no number.
_SAID = ("train", "optimizer", "data")
_NOT_SAID = frozenset(
    {
        "train.log_interval", "train.threads", "train.distributed_timeout_minutes", "train.eval_interval",
        "train.eval_iters", "data.cache_dir", "model.config_logger_dir",
    }
)  # fmt: skip


DATA_CONTENT = "the content of data.paths"
IMPORTED = "directory"
"""The fact that a manifest has of an import alone: what it remembers of the directory (huggingface/origin.py)."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A setting that a checkpoint and the run that reads it have in two values."""

    name: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.name} {_short(self.there)} -> {_short(self.here)}"


def check(
    run: RunConfig, folder: Path, manifest: Manifest, tokenizer: Any, otherwise: str = ""
) -> list[Change]:
    """The changes that only `--checkpoint.accept` allows.

    Args:
        otherwise: the remedy to name beside giving the config of the checkpoint's run.

    Raises ValueError naming every setting, with both values, by which this run computes something else.
    """
    changed = [*_model_changes(run, manifest), *_tokenizer_change(run, manifest, tokenizer)]
    accepted = [change for change in changed if change.name in run.checkpoint.accept]
    refused = [change for change in changed if change not in accepted]
    if refused:
        raise ValueError(f"the checkpoint {str(folder)!r} is of another model: {_told(refused, otherwise)}")
    return accepted


def run_of_manifest(manifest: Manifest) -> dict[str, Any]:
    """The sections of the run that saved a checkpoint, {} if it does not say; the recipe by name, which earlier versions
    left to a default that was another."""
    run = manifest.facts.get("run") or {}
    recipe = (manifest.facts.get("precision") or {}).get("fp8_recipe")
    if not recipe or not run.get("model"):
        return run
    model = without_fp8_format(run["model"])
    return {**run, "model": {**model, "fp8_recipe": model.get("fp8_recipe") or recipe}}


def _model_changes(run: RunConfig, manifest: Manifest) -> list[Change]:
    """Differences of shape or function. A checkpoint that was saved from Python may say nothing of its model."""
    return [change for change in _of_model(run, manifest) if _decides(change.name)]


def _decides(name: str) -> bool:
    return kind_of(name.removeprefix("model.")) in ("shape", "function")


def _of_model(run: RunConfig, manifest: Manifest) -> list[Change]:
    before = run_of_manifest(manifest).get("model")
    if before is None:
        return []
    found = differences(before, run.to_dict()["model"], plain_defaults())
    return [Change(f"model.{name}", *values) for name, values in found.items()]


def plain_defaults() -> dict[str, Any]:
    """Every field of a model section with its default, as a manifest has it."""
    return RunConfig(model=ModelSection()).to_dict()["model"]


def _tokenizer_change(run: RunConfig, manifest: Manifest, tokenizer: Any) -> list[Change]:
    """By content; of a manifest that does not say what it was, by whether it was a file or bytes."""
    before = manifest.facts.get("tokenizer")
    if before is not None:
        return (
            []
            if before == tokenizer_fact(tokenizer)
            else [Change("data.tokenizer", before, tokenizer_fact(tokenizer))]
        )
    data = manifest.facts.get("run", {}).get("data")
    if data is None:
        return []
    there, here = data.get("tokenizer") or BYTES, run.data.tokenizer or BYTES
    return [] if (there == BYTES) == (here == BYTES) else [Change("data.tokenizer", there, here)]


def tokenizer_fact(tokenizer: Any) -> str:
    """What a manifest says of a tokenizer: its kind and a digest of its file."""
    return str(tokenizer.name)


def check_imported(run: RunConfig, facts: Mapping[str, Any]) -> None:
    """Raise ValueError if text would be cut into bytes for a model that was imported, and that nobody said was of bytes.

    Args:
        facts: the manifest's of the checkpoint that the model is from.
    """
    if IMPORTED in facts and run.data.tokenizer is None:
        raise ValueError(
            "the model was imported without its tokenizer, and bytes mean nothing to it: give the tokenizer.json that it"
            " came with (--data.tokenizer=FILE); if it was trained on bytes, --data.tokenizer=bytes."
        )


def _told(refused: list[Change], otherwise: str) -> str:
    known = {f"model.{field.name}" for field in dataclasses.fields(ModelSection)} | {"data.tokenizer"}
    names = [change.name for change in refused]
    never = [name for name in names if _is_shape(name)]
    foreign = [name for name in names if name not in known]
    may = [name for name in names if name not in never + foreign]
    told = [
        f"{change.name} is {_short(change.there)} there and {_short(change.here)} here" for change in refused
    ]
    text = f"{'; '.join(told)}. Give what it was trained with (config.yaml of its run){otherwise}."
    if never:
        text += f" No checkpoint can change its shape ({', '.join(never)})."
    if foreign:
        text += f" This version does not know {', '.join(foreign)}: use the one that wrote it."
    if may:
        text += f" To let it compute something else from here on: --checkpoint.accept={','.join(may)}."
    return text


def _is_shape(name: str) -> bool:
    return name.startswith("model.") and kind_of(name.removeprefix("model.")) == "shape"


def may_change(run: RunConfig, manifest: Manifest, data: list[str]) -> list[Change]:
    """What the run says otherwise, and may: layout, recipe, precision, lengths, data, dropout, rates, versions.

    Args:
        data: a digest of each data set. Of a manifest that has none, paths are all that is compared.
    """
    changed = [change for change in _of_model(run, manifest) if not _decides(change.name)]
    before, now = manifest.facts.get("run", {}), run.to_dict()
    identified = "tokenizer" in manifest.facts  # by content, wherever its file is
    for section in _SAID:
        changed += [
            Change(f"{section}.{name}", value, now[section][name])
            for name, value in before.get(section, {}).items()
            if name in now[section]
            and value != now[section][name]
            and not (name == "tokenizer" and identified)
        ]
    if (trained_on := manifest.facts.get("data", data)) != data:
        changed.append(Change(DATA_CONTENT, ", ".join(trained_on), ", ".join(data)))
    made_with, here = manifest.facts.get("versions", {}), versions()
    changed += [
        Change(name, made_with[name], here[name])
        for name in here
        if name in made_with and made_with[name] != here[name]
    ]
    return [change for change in changed if change.name not in _NOT_SAID]


def _short(value: Any) -> str:
    shown = str(value) if isinstance(value, str) and value.isprintable() and value else repr(value)
    if isinstance(value, Mapping) and len(shown) > 60:
        return f"{len(value)} entries"
    return shown if len(shown) <= 60 else shown[:57] + "..."
