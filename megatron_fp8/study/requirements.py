"""Missing requirements of a run's config on this machine, without importing Megatron-Core.

Keys are read as by `estimate`. If nothing is missing, `doctor` then checks the config as `train` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from ..backends import BACKENDS, LAYER_BACKENDS
from ..backends.transformer_engine import INSTALL
from ..estimate.config_reader import given_keys
from ..estimate.model import recipes_by_name
from ..mcore.config.rules import shown
from ..mcore.environment import HOW_TO_GET, SUPPORTED, has_te, uses_apex
from ..plan.settings import DEFAULT_RECIPE
from ..recipe import RECIPES, Recipe, check_recipe_name
from ..state.collectives import own_device
from .package_versions import megatron

_ANY_BACKEND = "fp8_backend=auto (the emulated backend runs on every device)"

NOT_LOOKED_AT = ("ranks", "data", "memory", "speed")
"""Not checked: number of GPUs for the layout, content of data files, memory, time."""

TE_FUNCTIONS = (
    "apply_rope_fusion", "fused_single_qkv_rope", "cpu_offloading", "fine_grained_activation_offloading",
    "moe_router_fusion", "moe_permute_fusion", "use_te_rng_tracker",
)  # fmt: skip
"""Fields that call functions of Transformer Engine."""


@dataclass(frozen=True)
class Need:
    """A missing requirement: what, why, and the remedy."""

    what: str
    reason: str
    remedy: str


def missing(options: list[str]) -> list[Need]:
    """Requirements of a config that this machine does not meet.

    Args:
        options: `--config=FILE` and dotted options, each `--name=value`.

    Raises:
        ValueError: the file cannot be read, a key is unknown, or FP8 settings are invalid.
    """
    given = given_keys(options)
    _check_types(given)
    model = {key.removeprefix("model."): value for key, value in given.items() if key.startswith("model.")}
    return [*_megatron(), *_backend(model), *_functions(model), *_data(given), *_telemetry(given)]


_TEXTS = (
    "data.tokenizer", "data.cache_dir", "checkpoint.folder", "run_dir", "telemetry.te_config",
    "model.fp8_backend", "model.fp8_quantizer_factory",
)  # fmt: skip


def _check_types(given: Mapping[str, Any]) -> None:
    """Raises ValueError if a value used here has another type than `train` accepts."""
    for key in _TEXTS:
        if not isinstance(value := given.get(key) or "", str):
            raise ValueError(f"{key}={shown(value)} must be text: change it, or leave it out.")
    paths, overrides = given.get("data.paths") or [], given.get("model.fp8_overrides") or {}
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ValueError(f"data.paths={shown(paths)} must be a list of paths: change it, or leave it out.")
    if not isinstance(overrides, dict):
        raise ValueError(
            f"model.fp8_overrides={shown(overrides)} must be names and recipes: change it, or leave it out."
        )


def _megatron() -> Iterator[Need]:
    found = megatron()
    if found is None or not found.startswith(f"{SUPPORTED}."):
        reason = "it is not installed" if found is None else f"{found} is what Python imports here"
        yield Need(f"megatron-core {SUPPORTED}", reason, HOW_TO_GET)


def recipes_of(model: Mapping[str, Any]) -> list[Recipe]:
    """All recipes named in the model section, including overrides; none with FP8 off."""
    if not (model.get("fp8") or model.get("fp4")):
        return []
    in_fp4 = bool(model.get("fp4"))
    recipe = check_recipe_name(
        model.get("fp4_recipe") or "nvfp4" if in_fp4 else model.get("fp8_recipe") or DEFAULT_RECIPE
    )
    overrides = {**(model.get("fp8_overrides") or {})}
    overrides |= {key: value for key, value in model.items() if key.startswith("fp8_overrides.")}
    others = {name for name in overrides.values() if isinstance(name, str) and name in RECIPES}
    make = recipes_by_name({**model, "fp4_recipe" if in_fp4 else "fp8_recipe": recipe})
    return [make(None), *map(make, sorted(others - {recipe}))]


def _backend(model: Mapping[str, Any]) -> Iterator[Need]:
    """What a backend requested by name lacks; 'auto' always finds a backend."""
    request, recipes = model.get("fp8_backend") or "auto", recipes_of(model)
    known = BACKENDS | LAYER_BACKENDS
    if request not in known and request != "auto":
        raise ValueError(f"model.fp8_backend={request!r} must be one of auto, {', '.join(known)}.")
    if request == "auto":
        return
    device = own_device()
    for recipe in recipes:
        reason = known[request].supports(device, recipe)
        if reason is not None:
            yield Need(f"fp8_backend={request}", reason, _ANY_BACKEND)
            return


def _functions(model: Mapping[str, Any]) -> Iterator[Need]:
    for name in TE_FUNCTIONS:
        if model.get(name) and not has_te():
            yield Need(
                f"model.{name}",
                "it calls Transformer Engine, which is not installed",
                f"{INSTALL}, or leave it out",
            )
    if model.get("gradient_accumulation_fusion") and not uses_apex("fused_weight_gradient_mlp_cuda"):
        yield Need(
            "model.gradient_accumulation_fusion",
            "it needs a GPU and apex with fused_weight_gradient_mlp_cuda",
            "leave it out: FP8 linears accumulate in float32 without it",
        )


def _data(given: Mapping[str, Any]) -> Iterator[Need]:
    tokenizer = given.get("data.tokenizer")
    tokenizer = None if tokenizer == "bytes" else tokenizer
    if tokenizer and util.find_spec("tokenizers") is None:
        yield Need("data.tokenizer", "the package tokenizers is not installed", "pip install tokenizers")
    if tokenizer and not Path(tokenizer).is_file():
        yield Need(
            f"data.tokenizer={tokenizer}", "there is no such file", "give the path of a tokenizer.json"
        )
    for path in given.get("data.paths") or []:
        prefix = path[:-4] if path.endswith((".bin", ".idx")) else path
        pair = all(Path(prefix + ending).is_file() for ending in (".bin", ".idx"))
        if not pair and not Path(path).exists():
            yield Need(
                f"data.paths={path}",
                "there is no such file",
                "give files of text or records, a folder of them, or the prefix of a .bin/.idx pair",
            )
    for key in ("data.cache_dir", "checkpoint.folder", "run_dir"):
        if (folder := given.get(key)) and not _writable(Path(folder)):
            yield Need(f"{key}={folder}", "it cannot be written", "give a folder that this user can write")


def _writable(folder: Path) -> bool:
    """Whether a folder can be written or created."""
    existing = next((parent for parent in (folder, *folder.absolute().parents) if parent.exists()), Path("/"))
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _telemetry(given: Mapping[str, Any]) -> Iterator[Need]:
    if given.get("telemetry.wandb") and util.find_spec("wandb") is None:
        yield Need(
            "telemetry.wandb", "Weights & Biases is not installed", "pip install wandb, or leave it out"
        )
    if (features := given.get("telemetry.te_config")) and not Path(features).is_file():
        yield Need(
            f"telemetry.te_config={features}", "there is no such file", "give a file of debug features"
        )
