"""The same config and seed give the same losses, to the bit: what that takes of torch, and on GPUs of its libraries.

* Operations of torch: their deterministic form, where they have one; flash attention's backward, scatter and index_add
  have. What has none is an error that names it, not a warning that everybody filters.
* Attention: not cuDNN's, whose backward adds in any order. Torch leaves it out by itself from some version on.
* cuBLAS: a workspace that is not shared between streams, chosen by a variable that is read once.
* NCCL: no sums inside the switch (NVLS), whose order is not told.

This package's kernels combine the results of their programs by maxima and by counts of whole numbers only, which come out
the same in any order.
"""

from __future__ import annotations

import os

import torch

_WORKSPACES = (":4096:8", ":16:8")
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
        os.environ.setdefault("NCCL_ALGO", "^NVLS")
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True)
    # It would also fill every new tensor, which costs time and changes no result here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def in_words_of_the_run(error: Exception) -> Exception:
    """Torch's refusal of an operation, with the setting that allows it; any other error as it is."""
    operation, found, _ = str(error).partition(_NO_IMPLEMENTATION)
    if not found:
        return error
    return RuntimeError(
        f"training failed: {operation.strip()} {_NO_IMPLEMENTATION}, which train.deterministic asks for: train with"
        " --train.deterministic=false, and the same losses are not promised to the bit"
    )
