"""Bitwise determinism: settings of torch and of GPU libraries.

* Operations of torch: their deterministic form, where they have one; flash attention's backward, scatter and index_add
  have. What has none is an error that names it, not a warning that everybody filters.
* Attention: not cuDNN's, whose backward adds in any order. Torch leaves it out by itself from some version on.
* cuBLAS: a workspace that is not shared between streams, chosen by a variable that is read once.
* NCCL: no sums inside the switch, whose order is not told: neither NVLS nor, over several nodes, NVLSTree.

This package's kernels combine the results of their programs by maxima and by counts of whole numbers only, which come out
the same in any order.
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
    """Settings of this process. Call it before anything is computed on a GPU, and before the process group is made.

    Raises:
        ValueError: CUBLAS_WORKSPACE_CONFIG is set to something that cuBLAS is not deterministic with.
    """
    if torch.cuda.is_available():
        workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES[0])
        if workspace not in _WORKSPACES:
            raise ValueError(
                f"CUBLAS_WORKSPACE_CONFIG={workspace!r}: train.deterministic needs {' or '.join(map(repr, _WORKSPACES))};"
                " unset it, or train with --train.deterministic=false"
            )
        algorithms = os.environ.setdefault("NCCL_ALGO", _NOT_IN_THE_SWITCH)
        if (left := in_the_switch(algorithms)) and os.environ.get("NCCL_NVLS_ENABLE") != "0":
            warnings.warn(
                f"NCCL_ALGO={algorithms!r} allows {' and '.join(left)}, which add inside the switch, in any order:"
                " train.deterministic promises the same losses only without; unset it, or leave these out"
                f" ({_NOT_IN_THE_SWITCH!r} allows all others)",
                stacklevel=2,
            )
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True)
    # It would also fill every new tensor, which costs time and changes no result here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def in_the_switch(algorithms: str) -> list[str]:
    """Those of NCCL's algorithms that add inside the switch, as far as a value of NCCL_ALGO allows them for any sum.

    Read as NCCL reads it (parseList in its src/graph/tuning.cc): whole names in any case, separated by commas; a caret
    negates the whole list; lists for one function come after the one for all, as in 'ring;allreduce:^nvls,nvlstree'.
    """
    allowed = {function: set(_IN_THE_SWITCH) for function in ("allreduce", "reducescatter", "reduce")}
    for entry in algorithms.lower().split(";"):
        of, _, names = entry.rpartition(":")
        listed = names.removeprefix("^").split(",")
        for function in allowed:
            if of in ("", function):
                allowed[function] = {
                    name for name in _IN_THE_SWITCH if (name.lower() in listed) != names.startswith("^")
                }
    return [name for name in _IN_THE_SWITCH if any(name in names for names in allowed.values())]


def in_words_of_the_run(error: Exception) -> Exception:
    """Torch's refusal of an operation, with the setting that allows it; any other error as it is."""
    operation, found, _ = str(error).partition(_NO_IMPLEMENTATION)
    if not found:
        return error
    return RuntimeError(
        f"training failed: {operation.strip()} {_NO_IMPLEMENTATION}, which train.deterministic asks for: train with"
        " --train.deterministic=false, and the same losses are not promised to the bit"
    )
