"""Kernels of core attention: the config's choice, and blocks with their log-sum-exp.

config.attention_backend is Megatron-Core's enum:

    auto             torch's choice for scaled_dot_product_attention; Megatron-Core's own math for what that lacks
    flash            torch's flash attention; on GPUs FlashAttention 3 or 4 where its package is installed
    fused            cuDNN, through torch
    unfused, local   Megatron-Core's own math, which materialises the scores

A backend that is named runs or is refused; only `auto` chooses. A query that sees no key averages all values in
Megatron-Core's math, and gives zeros in torch's kernels.

Rejected: `nvidia-cudnn-frontend` and the `flash-attn` package called directly. torch's own operators call the same cuDNN
graphs and FlashAttention 2 kernels, return the log-sum-exp that a ring needs, and are differentiable. torch also puts
FlashAttention 3 and 4 behind the same operators.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

MASKED = -10000.0
"""The score of a hidden key, as Megatron-Core's attention_mask_func has it."""
SDPA_KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "fused": SDPBackend.CUDNN_ATTENTION}
"""Backends that run all of attention or are refused. Modules keep the names: torch's values cannot be pickled."""
_BACKENDS = ("auto", *SDPA_KERNELS, "unfused", "local")
_REMEDY = "Set attention_backend to 'auto', or to 'unfused' for Megatron-Core's own math"


def backend_name(config: Any) -> str:
    """Returns config.attention_backend, Megatron-Core's enum or a string, as a string."""
    return getattr(config.attention_backend, "name", config.attention_backend)


def chosen_backend(config: Any) -> str:
    """Returns config.attention_backend: 'auto', 'flash', 'fused', or 'unfused' for that and 'local'.

    Raises ValueError for another name, and for cuDNN in deterministic runs.
    """
    name = backend_name(config)
    if name not in _BACKENDS:
        raise ValueError(f"attention_backend={name!r} must be one of {', '.join(map(repr, _BACKENDS))}")
    deterministic = config.deterministic_mode or torch.are_deterministic_algorithms_enabled()
    if name == "fused" and deterministic and torch.cuda.is_available():  # CPUs: `check_backend`
        raise ValueError(
            "attention_backend='fused' with deterministic algorithms: cuDNN's backward of attention is not"
            f" deterministic. {_REMEDY}, or train without determinism (train.deterministic=false)"
        )
    return "unfused" if name == "local" else name


def check_backend(
    backend: str,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    widths: tuple[int, int],
    dropout_p: float = 0.0,
    masked: bool = False,
) -> None:
    """Runs a small attention forward and backward with `backend`; ValueError with torch's reasons if it cannot.

    Args:
        backend: a key of `SDPA_KERNELS`.
        heads, groups: query heads and key-value heads of this rank.
        widths: a head's channels of keys and of values.
        masked: with an explicit mask.
    """
    if torch.cuda.is_available() and backend == "flash":
        _activate_flash_package(torch.cuda.get_device_capability()[0])
    reasons = _refusal(backend, dtype, heads, groups, widths, dropout_p, masked)
    if reasons is not None:
        device = "this GPU" if torch.cuda.is_available() else "a CPU"
        asked = [f"heads of {widths[0]} and {widths[1]} channels in {str(dtype).removeprefix('torch.')}"]
        asked += [f"dropout {dropout_p}"] * bool(dropout_p) + ["masks or windows"] * masked
        raise ValueError(
            f"attention_backend={backend!r} cannot run on {device} with {', '.join(asked)}: {reasons.rstrip('. ')}."
            f" {_REMEDY}"
        )


@functools.cache
def _refusal(
    backend: str,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    widths: tuple[int, int],
    dropout_p: float,
    masked: bool,
) -> str | None:
    """Returns torch's reasons why it has no kernel, None if it has."""
    if backend == "fused" and not torch.cuda.is_available():
        return "cuDNN needs an NVIDIA GPU"
    if masked and backend == "fused":
        return "with masks its gradients may be NaN (pytorch#196678)"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (
        torch.zeros(1, count, 128, width, dtype=dtype, device=device, requires_grad=True)
        for count, width in ((heads, widths[0]), (groups, widths[0]), (groups, widths[1]))
    )
    mask = torch.ones(128, 128, dtype=torch.bool, device=device) if masked else None
    gpus = [torch.cuda.current_device()] if device == "cuda" else []
    with (
        warnings.catch_warnings(record=True) as caught,
        torch.random.fork_rng(gpus, enabled=dropout_p > 0),  # weights may be drawn after this
        torch.enable_grad(),
        sdpa_kernel(SDPA_KERNELS[backend]),
    ):
        warnings.simplefilter("always")
        try:
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=not masked, enable_gqa=True
            ).sum().backward()
        except RuntimeError as error:
            said = [str(warning.message).split(" (Triggered")[0] for warning in caught]
            return " ".join(line for line in said if "not used because" not in line) or str(error)
    return None


def _activate_flash_package(capability: int) -> None:
    """Registers FlashAttention 3 or 4 with torch's operators if its package is installed and this GPU runs it."""
    active = getattr(torch_attention, "current_flash_attention_impl", lambda: "torch without a registry")
    if active() is not None:  # also where the user activated one
        return
    for name, package, capabilities in (
        ("FA3", "flash_attn_interface", (9,)),
        ("FA4", "flash_attn.cute", (9, 10)),
    ):
        if capability in capabilities and _is_installed(package):
            torch_attention.activate_flash_attention_impl(name)
            return


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent is not installed
        return False


# ---------------------------------------------------------------------------------------------------------------- blocks


class BlockKernel(NamedTuple):
    """Attention of queries to some of their keys, whose results merge by their log-sum-exp.

    forward(q, k, v, causal, hidden, scale) -> out, lse, rest
    backward(grad, q, k, v, out, lse, rest, causal, hidden, scale) -> dq, dk, dv

    q, out, grad [b, heads, sq, d]; k, v [b, groups, sk, d]; lse [b, heads, sq], at least float32; hidden bool
    [b or 1, 1, sq, sk] or None. In backward out and lse are of all blocks together, and grad is theirs.
    """

    forward: Callable[..., tuple[Tensor, Tensor, tuple[Any, ...]]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


_aten = torch.ops.aten


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, hidden: None, scale: float) -> Any:
    return *_aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale), ()


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: tuple[()],
    causal: bool, hidden: None, scale: float,
) -> Any:  # fmt: skip
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, scale=scale
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, hidden: None, scale: float) -> Any:
    found = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return found[0], found[1], found[6:8]  # the random state, which backward takes even without dropout


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: tuple[Any, ...],
    causal: bool, hidden: None, scale: float,
) -> Any:  # fmt: skip
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.size(2), k.size(2), 0.0, causal, *rest, scale=scale
    )


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, hidden: None, scale: float) -> Any:
    found = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return found[0], found[1].view(q.shape[:3]), found[6:8]  # its log-sum-exp is [b, heads, sq, 1]


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: tuple[Any, ...],
    causal: bool, hidden: None, scale: float,
) -> Any:  # fmt: skip
    return _aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse.unsqueeze(-1), *rest, None, None, None, q.size(2), k.size(2), 0.0, causal, scale=scale
    )  # fmt: skip


def _scores(
    q: Tensor, k: Tensor, causal: bool, hidden: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Returns scores [b, groups, heads / groups, sq, sk], at least float32, and what is hidden in them.

    Multiplied in that dtype too: with BF16 scores the gradient of q was up to twice as far from float64 as one rank's.
    """
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = (_wide(grouped) @ _wide(k).unsqueeze(2).mT) * scale
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    elif hidden is not None:
        hidden = hidden.unsqueeze(2)
    return scores if hidden is None else scores.masked_fill_(hidden, MASKED), hidden


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _math_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, hidden: Tensor | None, scale: float) -> Any:
    scores, _ = _scores(q, k, causal, hidden, scale)
    lse = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse).exp_().to(v.dtype) @ v.unsqueeze(2)
    return out.flatten(1, 2), lse.flatten(1, 2).squeeze(-1), ()


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: tuple[()],
    causal: bool, hidden: Tensor | None, scale: float,
) -> Any:  # fmt: skip
    scores, hidden = _scores(q, k, causal, hidden, scale)
    grad, out, lse, q = (x.unflatten(1, (k.shape[1], -1)) for x in (grad, out, lse, q))
    probabilities = (scores - lse.unsqueeze(-1)).exp_()
    dv = (probabilities.to(grad.dtype).mT @ grad).sum(2)
    mean = (_wide(grad) * out).sum(-1, keepdim=True)
    d_scores = probabilities * (_wide(grad) @ _wide(v).unsqueeze(2).mT - mean) * scale
    if hidden is not None:
        d_scores = d_scores.masked_fill(hidden, 0.0)  # a score that was replaced has no gradient
    d_scores = d_scores.to(q.dtype)
    return (d_scores @ k.unsqueeze(2)).flatten(1, 2), (d_scores.mT @ q).sum(2), dv


CPU_FLASH = BlockKernel(_cpu_forward, _cpu_backward)
FLASH = BlockKernel(_flash_forward, _flash_backward)
CUDNN = BlockKernel(_cudnn_forward, _cudnn_backward)
MATH = BlockKernel(_math_forward, _math_backward)


def block_kernel(backend: str, q: Tensor, k: Tensor, v: Tensor, masked: bool) -> BlockKernel:
    """Returns the kernel of a ring's blocks. Only 'auto' chooses: flash attention, or math without it.

    Raises ValueError for a mask with a backend that is named.
    """
    if masked and backend in SDPA_KERNELS:
        raise ValueError(f"attention_backend={backend!r} takes no mask in a ring. {_REMEDY}")
    if backend == "fused":
        return CUDNN
    flash = FLASH if q.device.type == "cuda" else CPU_FLASH
    if backend == "flash":
        return flash
    if backend == "unfused" or masked or k.shape[-1] != v.shape[-1]:
        return MATH
    if flash is FLASH and not (
        q.shape[-1] % 8 == 0 and can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, True))
    ):
        return MATH
    return flash
