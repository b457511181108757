"""fp8_matmul: one differentiable FP8 matrix product, without layer, model or state."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..files.argument_check import check_tensor
from ..linear.function import fp8_linear
from ..linear.gemm_site import GemmSite
from ..plan.autocast_state import is_watched
from ..plan.resolve import SiteRequest, resolve
from ..recipe import Recipe, recipe_name
from ..state.fp8_state import Fp8State
from .config import Fp8Config


def fp8_matmul(
    a: torch.Tensor, b: torch.Tensor, recipe: Recipe | str | None = None, *, backend: str = "auto"
) -> torch.Tensor:
    """a @ b with operands cast to FP8; both gradients are computed in FP8 too.

        fprop  y  = a @ b            a as the recipe's 'input', b as its 'weight'
        dgrad  da = dy @ b^T         dy as its 'grad_output': E5M2 under hybrid recipes
        wgrad  db = a^T @ dy

    Args:
        a: [..., K], float32, bfloat16 or float16.
        b: [K, N], the same dtype.
        recipe: name or instance; None is 'tensorwise'. DelayedScaling has no history here, so it uses the
            current amax, as in its first iteration.
        backend: 'auto', or a backend's name.

    Returns:
        [..., N] in a's dtype, accumulated in float32 and rounded once. Backward saves FP8 codes, one byte per
        value. NaN gives NaN in the outputs that use it; Inf saturates.

    Raises:
        ValueError: shapes or dtypes do not fit, the recipe is unknown, or the backend cannot run on a's
            device.

    torch.compile breaks the graph here: a compiled product needs a layer that outlives the call.
    """
    if torch.compiler.is_compiling():
        from ..linear.compiled import break_graph  # loads torch's compiler

        return break_graph(partial(fp8_matmul, backend=backend), a, b, recipe)
    check_tensor("fp8_matmul", a)
    check_tensor("fp8_matmul", b)
    resolved = Fp8Config(recipe=recipe).resolved_recipe
    if b.ndim != 2 or a.ndim < 1:
        raise ValueError(
            f"fp8_matmul of {tuple(a.shape)} and {tuple(b.shape)}: a [..., K] and one matrix b [K, N] are needed; loop"
            " over a batch of b"
        )
    if a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"fp8_matmul of {tuple(a.shape)} and {tuple(b.shape)}: a's last dimension and b's first must be equal"
        )
    if a.dtype != b.dtype or a.device != b.device:
        raise ValueError(
            f"fp8_matmul of {a.dtype} on {a.device} and {b.dtype} on {b.device}: give both the same dtype and device"
        )
    # A traced backward looks its site up by number after this call has returned.
    make = _lasting_site if is_watched(a, b) else _site
    return fp8_linear(a, b.t(), None, make(a.device, resolved, backend))


def _site(device: torch.device, recipe: Recipe, backend: str) -> GemmSite:
    request = SiteRequest(recipe, backend=backend)
    plan = resolve(request, f"fp8_matmul {recipe_name(recipe)}", None, device)
    with _disable_current_modes():  # the site outlives fake-tensor and tracing modes
        return GemmSite(plan, Fp8State(device), None)


_lasting_site = lru_cache(_site)
