"""Versions of packages, and combinations known not to work.

Each combination has a source: this package's own check, its documentation, or a public issue.
"""

from __future__ import annotations

import platform
import re
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from ..backends.transformer_engine import INSTALL, NEEDS
from ..kernels.gemms import cpu_multiplies
from ..mcore.environment import HOW_TO_GET

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
        *(Part(name, installed(name, module), purpose, how) for name, module, purpose, how in _PACKAGES),
    ]


def installed(package: str, module: str) -> str | None:
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
