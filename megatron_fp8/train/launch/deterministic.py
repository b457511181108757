"""Bitwise determinism: settings of torch and of GPU libraries.

* Torch's operations: the deterministic version, where one exists (flash attention's backward, scatter and index_add
  have one). An operation without one raises an error that names it; users tend to filter warnings.
* Attention: cuDNN's is off, as its backward adds in no fixed order. Newer versions of torch exclude it themselves.
* cuBLAS: one workspace per stream, set by an environment variable that cuBLAS reads once.
* NCCL: no reduction inside the switch (NVLS, and NVLSTree over several nodes), whose order is not documented.

This package's kernels combine the results of their programs by maxima and integer counts only. Their order does not
change the result.
"""

from __future__ import annotations

import os
import warnings

import torch

_WORKSPACES = (":4096:8", ":16:8")
_IN_THE_SWITCH = ("NVLS", "NVLSTree")
_NOT_IN_THE_SWITCH = "^" + ",".join(_IN_THE_SWITCH)
_NO_IMPLEMENTATION = "does not have a deterministic implementation"


def be_deterministic() -> None:
    """Make this process compute deterministically. Call before any GPU work and before the process group exists.

    Raises:
        ValueError: CUBLAS_WORKSPACE_CONFIG has a value with which cuBLAS is not deterministic.
    """
    if torch.cuda.is_available():
        workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES[0])
        if workspace not in _WORKSPACES:
            raise ValueError(
                f"CUBLAS_WORKSPACE_CONFIG={workspace!r}: train.deterministic needs {' or '.join(map(repr, _WORKSPACES))};"
                " unset it, or train with --train.deterministic=false"
            )
        algorithms = os.environ.setdefault("NCCL_ALGO", _NOT_IN_THE_SWITCH)
        if (unordered := in_the_switch(algorithms)) and os.environ.get("NCCL_NVLS_ENABLE") != "0":
            warnings.warn(
                f"NCCL_ALGO={algorithms!r} allows {' and '.join(unordered)}, which add inside the switch, in any order:"
                " train.deterministic promises the same losses only without; unset it, or leave these out"
                f" ({_NOT_IN_THE_SWITCH!r} allows all others)",
                stacklevel=2,
            )
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True)
    # Torch would also fill every new tensor: that costs time and changes no result here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def in_the_switch(algorithms: str) -> list[str]:
    """The NCCL algorithms with reductions inside the switch that a value of NCCL_ALGO allows for any reduction.

    Reads the value as NCCL does (parseList in its src/graph/tuning.cc): complete names, in any case, separated by
    commas. A caret negates the whole list. Lists for one function follow the list for all:
    'ring;allreduce:^nvls,nvlstree'.
    """
    allowed = {function: set(_IN_THE_SWITCH) for function in ("allreduce", "reducescatter", "reduce")}
    for entry in algorithms.lower().split(";"):
        function_name, _, names = entry.rpartition(":")
        listed = names.removeprefix("^").split(",")
        for function in allowed:
            if function_name in ("", function):
                allowed[function] = {
                    name for name in _IN_THE_SWITCH if (name.lower() in listed) != names.startswith("^")
                }
    return [name for name in _IN_THE_SWITCH if any(name in names for names in allowed.values())]


def in_words_of_the_run(error: Exception) -> Exception:
    """Return torch's refusal of an operation with the setting that allows it; return other errors unchanged."""
    operation, refused, _ = str(error).partition(_NO_IMPLEMENTATION)
    if not refused:
        return error
    return RuntimeError(
        f"training failed: {operation.strip()} {_NO_IMPLEMENTATION}, which train.deterministic asks for: train with"
        " --train.deterministic=false, and the same losses are not promised to the bit"
    )
