"""Compatibility of a checkpoint and the run that reads it.

The manifest has the config of the run that saved the checkpoint. A model section that would compute something else with
the same weights is refused, field by field (listed in ``model_fields``), unless `--checkpoint.accept` names the field.
A different tokenizer is refused too, as it changes the meaning of the ids. Allowed changes are reported in one line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...files.checkpoint import Manifest
from ...plan.settings import without_fp8_format
from ..config.model_fields import differences, kind_of
from ..config.model_section import ModelSection
from ..config.run_config import RunConfig
from ..data.tokenizers import BYTES
from ..report import versions

# Sections (beside the model) whose changes are reported, and settings whose changes are not: they change no numbers.
_REPORTED = ("train", "optimizer", "data")
_NOT_REPORTED = frozenset(
    {
        "train.log_interval", "train.threads", "train.distributed_timeout_minutes", "train.eval_interval",
        "train.eval_iters", "train.cuda_graphs", "data.cache_dir", "model.config_logger_dir",
    }
)  # fmt: skip


DATA_CONTENT = "the content of data.paths"
IMPORTED = "directory"
"""A manifest entry of imported models only: facts of the imported directory (huggingface/checkpoint_reader.py)."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A setting whose value differs between a checkpoint and the run that reads it."""

    name: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.name} {_short(self.there)} -> {_short(self.here)}"


def check(
    run: RunConfig, folder: Path, manifest: Manifest, tokenizer: Any, otherwise: str = ""
) -> list[Change]:
    """Return the changes that are allowed only because `--checkpoint.accept` names them.

    Args:
        otherwise: a further remedy for the error message, beside the config of the checkpoint's run.

    Raises ValueError that names each setting that changes what the run computes, with both values.
    """
    changed = [*_model_changes(run, manifest), *_tokenizer_change(run, manifest, tokenizer)]
    accepted = [
        change for change in changed if change.name in run.checkpoint.accept and not _is_shape(change.name)
    ]
    refused = [change for change in changed if change not in accepted]
    if refused:
        raise ValueError(
            f"the checkpoint {str(folder)!r} is of another model: {_differences_text(refused, otherwise)}"
        )
    return accepted


def run_of_manifest(manifest: Manifest) -> dict[str, Any]:
    """The config sections of the run that saved a checkpoint; {} if the manifest has none.

    The recipe is always named: earlier versions left it to a default that has changed.
    """
    run = manifest.facts.get("run") or {}
    recipe = (manifest.facts.get("precision") or {}).get("fp8_recipe")
    if not recipe or not run.get("model"):
        return run
    model = without_fp8_format(run["model"])
    return {**run, "model": {**model, "fp8_recipe": model.get("fp8_recipe") or recipe}}


def _model_changes(run: RunConfig, manifest: Manifest) -> list[Change]:
    """Differences of shape or function. The checkpoint of a Python program may have no model section."""
    return [change for change in _model_differences(run, manifest) if _changes_output(change.name)]


def _changes_output(name: str) -> bool:
    return kind_of(name.removeprefix("model.")) in ("shape", "function")


def _model_differences(run: RunConfig, manifest: Manifest) -> list[Change]:
    saved = run_of_manifest(manifest).get("model")
    if saved is None:
        return []
    changes = differences(saved, run.to_dict()["model"], plain_defaults())
    return [Change(f"model.{name}", *values) for name, values in changes.items()]


def plain_defaults() -> dict[str, Any]:
    """Every field of a model section with its default, in the manifest's form."""
    return RunConfig(model=ModelSection()).to_dict()["model"]


def _tokenizer_change(run: RunConfig, manifest: Manifest, tokenizer: Any) -> list[Change]:
    """Compares content; if the manifest has no digest, only whether it was a file or bytes."""
    saved = manifest.facts.get("tokenizer")
    if saved is not None:
        return (
            []
            if saved == tokenizer_fact(tokenizer)
            else [Change("data.tokenizer", saved, tokenizer_fact(tokenizer))]
        )
    data = manifest.facts.get("run", {}).get("data")
    if data is None:
        return []
    there, here = data.get("tokenizer") or BYTES, run.data.tokenizer or BYTES
    return [] if (there == BYTES) == (here == BYTES) else [Change("data.tokenizer", there, here)]


def tokenizer_fact(tokenizer: Any) -> str:
    """A tokenizer's entry in a manifest: its kind and a digest of its file."""
    return str(tokenizer.name)


def check_imported(run: RunConfig, facts: Mapping[str, Any]) -> None:
    """Raise ValueError if text would be split into bytes for an imported model that is not declared to use bytes.

    Args:
        facts: from the manifest of the model's checkpoint.
    """
    if IMPORTED in facts and run.data.tokenizer is None:
        raise ValueError(
            "the model was imported without its tokenizer, and bytes mean nothing to it: give the tokenizer.json that it"
            " came with (--data.tokenizer=FILE); if it was trained on bytes, --data.tokenizer=bytes."
        )


def _differences_text(refused: list[Change], otherwise: str) -> str:
    known = {f"model.{field.name}" for field in dataclasses.fields(ModelSection)} | {"data.tokenizer"}
    names = [change.name for change in refused]
    shapes = [name for name in names if _is_shape(name)]
    unknown = [name for name in names if name not in known]
    acceptable = [name for name in names if name not in shapes + unknown]
    lines = [
        f"{change.name} is {_short(change.there)} there and {_short(change.here)} here" for change in refused
    ]
    text = f"{'; '.join(lines)}. Give what it was trained with (config.yaml of its run){otherwise}."
    if shapes:
        text += f" No checkpoint can change its shape ({', '.join(shapes)})."
    if unknown:
        text += f" This version does not know {', '.join(unknown)}: use the one that wrote it."
    if acceptable:
        text += f" To let it compute something else from here on: --checkpoint.accept={','.join(acceptable)}."
    return text


def _is_shape(name: str) -> bool:
    return name.startswith("model.") and kind_of(name.removeprefix("model.")) == "shape"


def may_change(run: RunConfig, manifest: Manifest, data: list[str]) -> list[Change]:
    """Changes of the run that are allowed: layout, recipe, precision, lengths, data, dropout, rates, versions.

    Args:
        data: a digest of each data set. If the manifest has none, only paths are compared.
    """
    changed = [change for change in _model_differences(run, manifest) if not _changes_output(change.name)]
    saved_run, now = manifest.facts.get("run", {}), run.to_dict()
    identified = "tokenizer" in manifest.facts  # by content, wherever the file is
    for section in _REPORTED:
        changed += [
            Change(f"{section}.{name}", value, now[section][name])
            for name, value in saved_run.get(section, {}).items()
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
    return [change for change in changed if change.name not in _NOT_REPORTED]


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, str) and value.isprintable() and value else repr(value)
    if isinstance(value, Mapping) and len(text) > 60:
        return f"{len(value)} entries"
    return text if len(text) <= 60 else text[:57] + "..."
