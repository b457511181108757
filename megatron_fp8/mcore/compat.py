"""What is installed, and every difference between Megatron-Core set-ups, decided once.

Nothing here imports Megatron or Transformer Engine: the probes look at package metadata.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata, util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_fp8.mcore.patching import Patch

SUPPORTED = "0.16"


def installed_megatron() -> str:
    """'megatron-core 0.16.1', or 'megatron-core is not installed'."""
    try:
        return f"megatron-core {metadata.version('megatron-core')}"
    except metadata.PackageNotFoundError:
        return "megatron-core is not installed"


def require_megatron() -> None:
    """Raises RuntimeError unless a Megatron-Core of the supported series is installed."""
    found = installed_megatron()
    if not found.startswith(f"megatron-core {SUPPORTED}."):
        raise RuntimeError(
            f"megatron_fp8 needs megatron-core {SUPPORTED}.x, found: {found}. Run: pip install megatron-core=={SUPPORTED}.1"
        )


@lru_cache(maxsize=None)
def has_te() -> bool:
    """Whether Transformer Engine can be imported (found, not imported)."""
    return util.find_spec("transformer_engine") is not None


@lru_cache(maxsize=None)
def has_apex() -> bool:
    """Whether NVIDIA's apex can be imported (found, not imported)."""
    return util.find_spec("apex") is not None


def has_cuda() -> bool:
    """Whether this process sees a CUDA device. Not cached: tests hide it."""
    import torch

    return torch.cuda.is_available()


def patches() -> list[Patch]:
    """Patches that Megatron-Core 0.16 needs wherever Transformer Engine is absent, with or without a GPU."""
    if has_te():
        return []
    from packaging.version import Version

    from megatron_fp8.mcore.norm import Norm
    from megatron_fp8.mcore.patching import Patch

    found = [
        Patch(
            "megatron.core.utils",
            "_te_version",
            Version("0.0"),
            "without Transformer Engine the version is None, and is_te_min_version() compares None: a TypeError",
        ),
        Patch(
            "megatron.core.transformer.moe.moe_utils",
            "te_general_gemm",
            None,
            "the router asks `te_general_gemm is not None`, a name defined only if Transformer Engine imports",
            create=True,
        ),
    ]
    if not has_apex():
        found.append(
            Patch(
                "megatron.core.transformer.transformer_block",
                "LayerNormImpl",
                Norm,
                "the final norm of a model built from a layer spec is WrappedTorchNorm, which refuses SP",
            )
        )
    return found
