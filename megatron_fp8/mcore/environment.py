"""The installed Megatron-Core and its companions, and the groups that reduce amaxes.

Importing this module imports neither Megatron-Core nor Transformer Engine; only the version check imports Megatron-Core.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

SUPPORTED, SUPPORTED_BRIDGE = "0.16", "0.3"
"""The series of Megatron-Core and Megatron-Bridge; no other module compares their versions. For another series:
``python -m benchmarks.megatron_sources CHECKOUT``."""
HOW_TO_GET = (
    f"pip install megatron-core=={SUPPORTED}.1, which has wheels for Linux and Python 3.10 to 3.13;"
    " convert_to_fp8 and all of megatron_fp8.nn work without it, on every platform"
)


def installed_megatron() -> str:
    """Returns 'megatron-core 0.16.1 in <path>' of the copy that Python imports, or 'megatron-core is not installed'.

    pip's metadata may describe another copy: a checkout of Megatron-LM on PYTHONPATH has none and is imported first.
    """
    try:
        package = importlib.import_module("megatron.core.package_info")
    except ModuleNotFoundError as error:
        if error.name is None or not "megatron.core.package_info".startswith(error.name):
            raise  # megatron-core is installed, but a dependency of it is missing
        return "megatron-core is not installed"
    return f"megatron-core {package.__version__} in {Path(str(package.__file__)).parent}"


def is_supported(version: str) -> bool:
    """Whether a version of Megatron-Core is of the supported series."""
    return version.startswith(f"{SUPPORTED}.")


def require_megatron() -> None:
    """Raises RuntimeError unless Python imports a Megatron-Core of the supported series."""
    found = installed_megatron()
    if not is_supported(found.removeprefix("megatron-core ")):
        raise RuntimeError(
            f"this part of megatron_fp8 needs megatron-core {SUPPORTED}.x, found: {found}. To get it: {HOW_TO_GET}."
            " Another copy on PYTHONPATH or in the working directory is imported first"
        )


def require_bridge() -> None:
    """Raises RuntimeError unless Python imports a Megatron-Bridge of the supported series."""
    try:
        found = importlib.import_module("megatron.bridge.package_info").__version__
    except ModuleNotFoundError as error:
        if error.name not in ("megatron.bridge", "megatron.bridge.package_info"):
            raise  # it is installed, and a dependency of it is missing
        found = "none"
    if not found.startswith(f"{SUPPORTED_BRIDGE}."):
        raise RuntimeError(
            f"this part of megatron_fp8 needs megatron-bridge {SUPPORTED_BRIDGE}.x, found: {found}. To get it:"
            f" pip install megatron-bridge=={SUPPORTED_BRIDGE}.1"
        )


def require_whole_te() -> None:
    """Raises RuntimeError if an installed Transformer Engine does not import, for example after torch was replaced."""
    if has_te():
        from ..backends.transformer_engine import import_failure

        if (reason := import_failure()) is not None:
            raise RuntimeError(
                f"{reason}. Megatron-Core imports it wherever it is found: repair it, or pip uninstall transformer-engine"
            )


@functools.cache
def has_te() -> bool:
    """Whether Transformer Engine can be imported (found, not imported)."""
    return util.find_spec("transformer_engine") is not None


@functools.cache
def has_apex() -> bool:
    """Whether NVIDIA's apex can be imported (found, not imported)."""
    return util.find_spec("apex") is not None


def uses_apex(extension: str) -> bool:
    """Whether a part of apex works here: on a GPU, with the CUDA extension that it needs.

    Args:
        extension: 'amp_C' for Adam and clipping, 'fused_layer_norm_cuda', 'fused_weight_gradient_mlp_cuda'. apex can
            be installed without any.
    """
    return has_apex() and has_cuda() and util.find_spec(extension) is not None


def missing_fusions(config: Any) -> dict[str, tuple[Any, str]]:
    """Returns a config's fused kernels that this machine lacks: field -> (its value without the kernel, what it needs).

    Args:
        config: of Megatron-Core's class, or of a subclass. Fields that it lacks are off.
    """
    cuda = has_cuda()
    softmax = ("scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda")
    latent = getattr(
        config, "multi_latent_attention", False
    )  # its rotation is a Triton kernel of Megatron-Core
    fusions = {
        "masked_softmax_fusion": (
            True, False, cuda and all(map(util.find_spec, softmax)), f"a GPU and {softmax[0]}"
        ),
        "apply_rope_fusion": (True, False, cuda and (latent or has_te()), "a GPU and Transformer Engine"),
        "moe_permute_fusion": (True, False, cuda and has_te(), "a GPU and Transformer Engine"),
        "cross_entropy_fusion_impl": ("te", "native", cuda and has_te(), "a GPU and Transformer Engine"),
        "gradient_accumulation_fusion": (
            True, False, uses_apex("fused_weight_gradient_mlp_cuda"), "a GPU and apex's CUDA extensions"
        ),
    }  # fmt: skip
    return {
        name: (without, needs)
        for name, (fused, without, present, needs) in fusions.items()
        if getattr(config, name, without) == fused and not present
    }


def has_cuda() -> bool:
    """Whether this process sees a CUDA device. Not cached: tests hide it."""
    import torch

    return torch.cuda.is_available()


def amax_group(config: Any, *, expert: bool) -> Any:
    """Returns the group that reduces the amaxes of one GEMM site: TP x DP x CP within a pipeline stage.

    TP x CP with tp_only_amax_red; for experts expert TP x expert DP, the ranks that hold (parts of) the same experts.
    The first call for experts with tensor parallelism is collective over these ranks: Megatron-Core makes no such group.
    """
    from megatron.core import parallel_state

    if not expert:
        return parallel_state.get_amax_reduction_group(
            with_context_parallel=True, tp_only_amax_red=config.tp_only_amax_red
        )
    tensor, data = (
        parallel_state.get_expert_tensor_parallel_group(),
        parallel_state.get_expert_data_parallel_group(),
    )
    if tensor.size() == 1:
        return data
    return tensor if data.size() == 1 else _product(tensor, data)


@functools.cache
def _product(tensor: Any, data: Any) -> Any:
    """Creates the group that spans this rank's two groups. Collective over its ranks."""
    from torch import distributed as dist

    columns, rows = dist.get_process_group_ranks(tensor), dist.get_process_group_ranks(data)
    members = product_ranks(columns, rows, dist.get_rank())
    return dist.new_group(members, timeout=_timeout_of(data), use_local_synchronization=True)


def _timeout_of(group: Any) -> Any:
    """Returns the timeout of a group's collectives as a timedelta; None (torch's default) if its backend has none."""
    from ..state.collectives import device_of

    options = getattr(group._get_backend(device_of(group)), "options", None)
    return getattr(options, "_timeout", None)


def product_ranks(columns: Sequence[int], rows: Sequence[int], rank: int) -> list[int]:
    """Returns the sorted ranks of the grid that two groups span; ``rank`` is in both groups.

    Megatron-Core numbers ranks in mixed radix, so offsets within a group are the same in every group of the same kind.
    """
    return sorted(row + column - rank for row in rows for column in columns)
