"""megatron_fp8 inside Megatron-Core: `install()` sets the hooks, reversibly. Importing this sets none."""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from .patches.patching import PatchSet

__all__ = ["install", "is_installed", "print_plan", "site_report", "uninstall"]

# Megatron-Core's import warns so on every machine without apex and Transformer Engine, and this package needs neither.
warnings.filterwarnings(
    "ignore", "(Transformer Engine and )?Apex (is|are) not installed", module=r"megatron\.core\."
)
warnings.filterwarnings("ignore", "The legacy GroupedMLP", module=r"megatron\.core\.")  # it is replaced
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(megatron\.core|torch\.jit)\.")

_installed: PatchSet | None = None


def install() -> None:
    """Prepares Megatron-Core for FP8: sets the FP8 hooks and, without CUDA, the patches for the CPU and gloo.

    Call it once per process before building groups, models or optimizers. Further calls do nothing. Megatron-Core may
    have been imported before.

    Raises RuntimeError if Megatron-Core is missing, of another series, or lacks a name that is patched, or if an
    installed Transformer Engine does not import. Then nothing is changed.
    """
    global _installed
    if _installed is not None:
        return
    from ..kernels.triton_support import settle_inductor
    from . import environment as compat
    from .patches.missing_packages import plain_functions
    from .patches.patching import PatchSet

    cuda = compat.has_cuda()
    if cuda:
        settle_inductor()  # with CUDA, Megatron-Core compiles some of its functions
    with nullcontext() if cuda else plain_functions():
        compat.require_whole_te()
        compat.require_megatron()
        from .patches import cpu_engine, missing_packages

        patches = [*(missing_packages.on_gpu() if cuda else cpu_engine.patches())]
        from .optimizer import adam
        from .patches import fp8_hooks

        patches += [*fp8_hooks.patches(), *adam.patches()]
    patch_set = PatchSet(patches)
    patch_set.apply()
    _installed = patch_set
    _offer_spec()


def uninstall() -> None:
    """Undoes `install()`: restores every patched name. Does nothing if not installed.

    Without CUDA, Megatron-Core functions that `install()` was the first to import stay uncompiled.
    """
    global _installed
    if _installed is not None:
        _installed.revert()
        _installed = None
        _offer_spec()


def _offer_spec() -> None:
    """Updates `spec.gpt_layer_fp8_spec` (for --spec) if spec.py is imported: it exists while hooks are installed."""
    if spec := sys.modules.get(f"{__name__}.spec"):
        spec.offer()


def is_installed() -> bool:
    """Whether the hooks are in place."""
    return _installed is not None


def site_report(model: Any, *, gather: bool = True) -> list[dict[str, Any]]:
    """Lists what runs in which precision, and why: one dict for each GEMM site.

    Args:
        model: this rank's model, or the list of its chunks.
        gather: join the sites of all ranks into one list (collective if torch.distributed is initialised).

    Raises:
        ValueError: a site cannot run as the config asks.
    """
    from .report import site_report as report

    return report(list(model) if isinstance(model, list | tuple) else [model], gather=gather)


def print_plan(model: Any) -> None:
    """Prints the config's recipe and its origin, then the precision of every site. Sites with equal plans share a line.

    All ranks call it; the first one prints.
    """
    from ..files.terminal import print_rank_0
    from .report import plan_lines, recipe_line
    from .runtime import runtime_of, unwrap

    config = unwrap(model[0] if isinstance(model, list | tuple) else model).config
    runtime_of(config).plan_shown = True
    print_rank_0("\n".join([recipe_line(config), *plan_lines(site_report(model))]), to="stdout")
