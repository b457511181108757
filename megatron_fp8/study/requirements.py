"""Requirements: versions on this machine, combinations known not to work, what a config lacks.

Each combination has a source: this package's own check, its documentation, or a public issue. A config's keys are read
as by `estimate`, without importing Megatron-Core. If nothing is missing, `doctor` then checks it as `train` does.
"""

from __future__ import annotations

import os
import platform
import re
import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from ..backends import BACKENDS, LAYER_BACKENDS
from ..backends.transformer_engine import INSTALL, NEEDS
from ..estimate.config_reader import given_keys
from ..estimate.model import recipes_by_name
from ..kernels.gemms import cpu_multiplies
from ..mcore.config.rules import check, one_of
from ..mcore.environment import HOW_TO_GET, SUPPORTED, has_te, is_supported
from ..plan.settings import DEFAULT_RECIPE
from ..recipe import RECIPES, Recipe, check_recipe_name
from ..state.collectives import own_device

UNKNOWN = "installed, version unknown"


@dataclass(frozen=True)
class Part:
    """A component whose version matters.

    Attributes:
        version: None: not installed. ``UNKNOWN``: installed, without metadata.
        needed_for, how: its purpose, and how to install it; empty if it is not installed separately.
    """

    name: str
    version: str | None
    needed_for: str = ""
    how: str = ""


@dataclass(frozen=True)
class Conflict:
    """A combination known not to work."""

    what: str
    reason: str
    remedy: str
    source: str


# (package, module to find, purpose, how to install it)
_PACKAGES = (
    ("triton", "triton", "FP8 kernels on GPUs", "pip install triton (needs a GPU)"),
    ("transformer-engine", "transformer_engine", "fp8_backend='transformer_engine'", f"{INSTALL} ({NEEDS})"),
    (
        "apex",
        "apex",
        "Megatron-Core's fused Adam, clipping, LayerNorm and weight gradients",
        "build https://github.com/NVIDIA/apex with its C++ and CUDA extensions",
    ),
    ("tokenizers", "tokenizers", "--data.tokenizer", "pip install tokenizers"),
    ("numpy", "numpy", "data", "pip install numpy"),
)


def parts() -> list[Part]:
    """Installed and missing components. Imports torch only."""
    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else None
    hip = vars(torch.version).get("hip")
    return [
        Part("python", platform.python_version()),
        Part("torch", torch.__version__, "everything", "pip install torch==2.13.0"),
        Part("driver", driver(), "GPUs", "NVIDIA's driver, from the machine's administrator"),
        Part(
            "cuda",
            torch.version.cuda or (f"ROCm {hip}" if hip else None),
            "GPUs",
            "a build of torch for CUDA",
        ),
        Part(
            "nccl",
            None if nccl is None else ".".join(map(str, nccl)),
            "several GPUs",
            "a build of torch for CUDA",
        ),
        Part("megatron-core", megatron(), "training by `megatron-fp8 train`", HOW_TO_GET),
        *(
            Part(name, installed_version(name, module), purpose, how)
            for name, module, purpose, how in _PACKAGES
        ),
    ]


def installed_version(package: str, module: str) -> str | None:
    """The installed version; None if the package is missing."""
    try:
        if util.find_spec(module) is None:
            return None
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # first: it is a subclass of ModuleNotFoundError
        return UNKNOWN
    except ModuleNotFoundError:  # from find_spec: the parent of a dotted module is missing
        return None


def megatron() -> str | None:
    """The version of the Megatron-Core that Python would import here. pip's metadata may differ: a checkout on
    PYTHONPATH has precedence and no metadata. Read from its file, without importing it."""
    try:
        found = util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    for folder in (found.submodule_search_locations or []) if found else []:
        if (facts := Path(folder, "package_info.py")).is_file():
            return str(runpy.run_path(str(facts)).get("__version__", UNKNOWN))
    return UNKNOWN if found else None


def driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The NVIDIA driver's version, from its kernel module; None without one."""
    if not file.exists():
        return None
    found = re.search(r"(?:Kernel Module|Module for \S+)\s+(\d+\.\d+(?:\.\d+)?)", file.read_text())
    return found.group(1) if found else UNKNOWN


@dataclass(frozen=True)
class Facts:
    """Facts that conflicts depend on; of this machine, except in tests.

    Attributes:
        versions: by a part's name; None: missing.
        has_amp_c: whether apex's CUDA extension is installed.
        interpreted: whether Triton's interpreter is enabled.
        slow_bfloat16: whether torch multiplies BF16 on this CPU element by element, and there is no GPU.
    """

    versions: Mapping[str, str | None]
    has_amp_c: bool = False
    interpreted: bool = False
    slow_bfloat16: bool = False

    def version(self, name: str) -> Version | None:
        """A part's version; None if missing or unknown."""
        try:
            return Version(self.versions.get(name) or "")
        except InvalidVersion:
            return None

    def within(self, name: str, low: str, high: str) -> bool:
        """Whether a part is installed with low <= version < high."""
        found = self.version(name)
        return found is not None and Version(low) <= Version(found.base_version) < Version(high)


def facts(found: list[Part], environ: Mapping[str, str]) -> Facts:
    """Facts of this machine."""
    return Facts(
        {part.name: part.version for part in found},
        util.find_spec("amp_C") is not None,
        environ.get("TRITON_INTERPRET") == "1",
        not torch.cuda.is_available() and not cpu_multiplies(torch.bfloat16),
    )


Rule = tuple[Callable[[Facts], Any], str, str, str, str]

_NEVER = "9999"

RULES: tuple[Rule, ...] = (
    (
        lambda f: f.within("triton", "0", "3.4"),
        "Triton older than 3.4",
        "the kernels need 3.4",
        "the release that this torch asks for: pip install --force-reinstall torch",
        "docs/backends.md",
    ),
    (
        lambda f: f.interpreted and f.within("triton", "3.6", "3.7") and f.within("numpy", "2.4", _NEVER),
        "Triton 3.6's interpreter with NumPy 2.4",
        "interpreted kernels fail; compiled ones are not concerned",
        "unset TRITON_INTERPRET, or pip install 'numpy<2.4'",
        "docs/installation.md",
    ),
    (
        lambda f: f.within("torch", "2.8", "2.8.99") or f.within("torch", "2.11", "2.11.99"),
        "torch 2.8 and 2.11 with torch.compile",
        "a converted model has to have run once before torch.compile traces it",
        "run it once before, or torch 2.13",
        "docs/installation.md",
    ),
    (
        lambda f: f.versions.get("apex") and f.versions.get("cuda") and not f.has_amp_c,
        "apex without its CUDA extensions",
        "its Adam and clipping are amp_C, which is not there",
        "build it with --cpp_ext and --cuda_ext, or pip uninstall apex",
        "docs/backends.md",
    ),
    (
        lambda f: f.slow_bfloat16,
        "torch's products of BF16 on a CPU without instructions for them",
        "of more than a few rows, 6 to 80 times as slow as in float32, which this package's commands have torch take",
        "in a program of your own: megatron_fp8.kernels.torch_products.replace_slow(), with torch.float16 for FP16",
        "docs/performance.md",
    ),
)  # fmt: skip
"""(condition, and the fields of the conflict): what no requirement of pip, trial or line of the matrix tells."""


def conflicts(of: Facts) -> list[Conflict]:
    """The known conflicts on this machine."""
    return [Conflict(*fields) for applies, *fields in RULES if applies(of)]


_ANY_BACKEND = "fp8_backend=auto (the emulated backend runs on every device)"

NOT_LOOKED_AT = ("ranks", "data", "memory", "speed")
"""Not checked: number of GPUs for the layout, content of data files, memory, time."""

TE_FUNCTIONS = (
    "fused_single_qkv_rope", "cpu_offloading", "fine_grained_activation_offloading", "moe_router_fusion",
    "use_te_rng_tracker",
)  # fmt: skip
"""Fields that call functions of Transformer Engine."""


@dataclass(frozen=True)
class Need:
    """A missing requirement: what, why, and the remedy."""

    what: str
    reason: str
    remedy: str


def missing_needs(options: list[str]) -> list[Need]:
    """Requirements of a config that this machine does not meet.

    Args:
        options: `--config=FILE` and dotted options, each `--name=value`.

    Raises:
        ValueError: the file cannot be read, a key is unknown, or FP8 settings are invalid.
    """
    given = given_keys(options)
    model = {key.removeprefix("model."): value for key, value in given.items() if key.startswith("model.")}
    return [*_megatron(), *_backend(model), *_functions(model), *_data(given), *_telemetry(given)]


def _megatron() -> Iterator[Need]:
    found = megatron()
    if found is None or not is_supported(found):
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
    check("model.fp8_backend", request, one_of("auto", *known))
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
