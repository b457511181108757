"""Values that all ranks must share before the first step, by name.

Hosts, devices, ranks and local paths may differ. Files are compared by content.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megatron.core
import torch

from ... import __version__
from ...files.checkpoint import MANIFEST, digest
from ..config.run_config import RunConfig
from ..data import corpus
from ..report import versions
from .parallel import backend

_LOCAL = frozenset(
    {
        "run_dir",
        "debug",
        "resume",
        "data.paths",
        "data.tokenizer",
        "data.cache_dir",
        "checkpoint.folder",
        "telemetry.te_config",
    }
)
_ENVIRONMENT = (
    "NVTE_", "MEGATRON_FP8_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TRITON_INTERPRET", "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS",
    "ATEN_CPU_CAPABILITY", "DNNL_", "ONEDNN_", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE",
)  # fmt: skip
"""Prefixes of environment variables that change what FP8 layers compute, or in which order."""
_ELSEWHERE = frozenset(
    {"DIR", "PATH", "VERBOSE", "DEBUG", "DUMP", "LOG", "LOGS", "TRACE", "PROFILE", "THREADS"}
)
"""A variable with one of these words sets paths, output or compile threads, which may differ between ranks."""


def run_facts(
    run: RunConfig, tokenizer: Any, world_size: int, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return launch, package versions, environment variables and options that all ranks must share, by name."""
    facts: dict[str, Any] = {
        "the world size": world_size,
        "the backend of the process group": backend(),
        "the source of megatron_fp8": _source_digest(),
        **{f"the version of {name}": version for name, version in versions().items()},
        "the version of torch": torch.__version__,
        "the version of megatron-core": megatron.core.__version__,
        "the version of megatron_fp8": __version__,
    }
    facts |= {name: value for name, value in environ.items() if _changes_numbers(name)}
    facts |= {key: value for key, value in _flat(run.to_dict()).items() if key not in _LOCAL}
    facts["data.tokenizer"] = tokenizer.name  # its name contains a digest of its content
    facts["data.paths"] = [Path(path).name for path in run.data.paths]
    facts["resume"] = run.resume if run.resume in ("auto", "never") else "a path"
    table, factory = run.model.fp8_size_filter, run.model.fp8_quantizer_factory
    if isinstance(table, str) and Path(table).is_file():
        facts["model.fp8_size_filter"] = _digest(Path(table))
    if run.telemetry.te_config is not None:
        facts["telemetry.te_config"] = _digest(Path(run.telemetry.te_config))
    if factory:
        facts[f"the source of {factory}"] = _module_digest(factory)
    return facts


def agree_on_inputs(
    what: str,
    launch: Any,
    prefixes: list[str],
    chosen: tuple[Path, Any] | None = None,
    timeout_s: float = 1800.0,
) -> None:
    """Wait until all ranks have found the same data sets and the same checkpoint.

    Each rank looks for the newest checkpoint itself, and a running training may save one meanwhile.

    Raises ValueError and RanksMissing as StartupBarrier.agree. ``what`` is the name of the call there.
    """
    first_here = launch.local_rank == 0
    facts = input_facts(prefixes, chosen, first_here)
    launch.barrier.agree(what, facts, timeout_s, partial=not first_here)


def input_facts(prefixes: list[str], chosen: tuple[Path, Any] | None, first_here: bool) -> dict[str, Any]:
    """The data sets and the checkpoint that a run starts from, as this rank sees them; a missing value is None.

    The first rank of a node (`first_here`) checks everything. The others, which may run in other containers, check only
    what is quick to read, so that not every rank loads a network file system with whole indices.
    """
    facts: dict[str, Any] = {}
    for number, prefix in enumerate(prefixes, 1):
        values = corpus.fingerprint(prefix, whole_index=False)
        if first_here:
            values |= corpus.fingerprint(prefix)
        suffix = f"of the data set {Path(prefix).name}" + f" ({number} of {len(prefixes)})" * (
            len(prefixes) > 1
        )
        facts |= {f"the {what} {suffix}": value for what, value in values.items()}
    if chosen is not None:
        folder, manifest = chosen
        suffix = f"of the checkpoint {folder.name}"
        facts[f"the SHA-256 of {MANIFEST} {suffix}"] = _digest(folder / MANIFEST)
        if first_here:
            facts |= {
                f"the bytes of {name} {suffix}": _size(folder / name) for name in sorted(manifest.files)
            }
    return facts


def _changes_numbers(variable: str) -> bool:
    """Whether an environment variable can change numerical results."""
    relevant = variable.startswith(_ENVIRONMENT)
    return relevant and (variable in _ENVIRONMENT or not _ELSEWHERE.intersection(variable.split("_")))


def data_fact(prefixes: list[str]) -> list[str]:
    """For the manifest: a digest of each data set's fingerprint, in order.

    Reads every index, so one rank alone should call it.
    """
    fingerprints = [json.dumps(corpus.fingerprint(prefix), sort_keys=True) for prefix in prefixes]
    return [hashlib.sha256(text.encode()).hexdigest()[:16] for text in fingerprints]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and not prefix:
            result |= _flat(value, f"{name}.")
        else:
            result[f"{prefix}{name}"] = value
    return result


def _digest(path: Path) -> str | None:
    """First 16 hex digits of a file's SHA-256; None if there is no file."""
    return digest(path)[:16] if path.is_file() else None


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _source_digest() -> str:
    root = Path(__file__).parents[2]
    hasher = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".c", ".h") and path.is_file():
            hasher.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()[:16]


def _module_digest(name: str) -> str | None:
    """Digest of the source file of an imported object, by import path; None without a file."""
    file = getattr(sys.modules.get(name.rpartition(".")[0]), "__file__", None)
    return _digest(Path(file)) if file else None
