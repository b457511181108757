"""Old documented module paths, redirected to the new ones.

Nothing in this package imports an old path. Others than documented ones are here only if models that torch.save wrote
whole name them.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from .files.terminal import warn_user

MOVED = {
    "calibration": "inference.calibration",
    "checkpoint_files": "files.checkpoint",
    "context": "plan.autocast_state",
    "graph": "state.cuda_graph",
    "inference.activations": "inference.static_scales",
    "kernels.caches": "kernels.triton_support",
    "linear.compiled_grouped": "linear.compiled",
    "linear.main_grad": "linear.gemm_site",
    "linear_op": "linear.compiled",
    "loss_scaler": "state.loss_scaler",
    "mcore.checkpoint_saver": "mcore.checkpoint.saver",
    "mcore.copies": "mcore.model_copies",
    "nn.find": "nn.module_lookup",
    "nn.group": "nn.fp8_group",
    "nn.transformer_fastpath": "nn.convert",
    "plan.switch": "plan.autocast_state",
    "state.graph": "state.cuda_graph",
    "telemetry.attribution": "diagnosis.attribution",
    "telemetry.diagnosis": "diagnosis.diagnosis",
    "trainer": "nn.trainer",
}
"""Old module -> today's, both relative to the package."""

_PACKAGE = __name__.rpartition(".")[0]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, old = fullname.partition(".")
        if package != _PACKAGE or old not in MOVED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        now = f"{_PACKAGE}.{MOVED[module.__name__.partition('.')[2]]}"
        warn_user(f"{module.__name__} is now {now}: import it from there.", FutureWarning)
        real = importlib.import_module(now)

        def look(name: str) -> Any:
            return getattr(real, name)

        vars(module)["__getattr__"] = look
        module.__doc__ = f"See {now}."


def install() -> None:
    """Makes the old paths importable. Once a process; called when the package is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
