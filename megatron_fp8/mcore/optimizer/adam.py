"""Adam that counts steps once a parameter group, as Megatron-Core's checkpoints expect.

Megatron-Core uses Transformer Engine's or apex's FusedAdam, which store ``step`` in the parameter group. Without them it
uses torch's AdamW, which stores a step per parameter, and its distributed optimizer then cannot resume: saving before
the first step fails an assertion, and after a load all parameters share one step tensor, which each of them increments.
This Adam has FusedAdam's interface; its arithmetic is torch's own function, so its bits equal torch.optim.AdamW's.

**With moments in FP8 and float16**: 3.06 bytes a parameter. float32 takes 8.

Every 128 values share a float32 scale, a power of two. Masters stay float32, and one parameter's moments are float32
during its update. FP8-LM divides the formats in the same way (Peng et al., arXiv 2310.18313), for this reason:

* the first moment moves by a tenth of its distance to the gradient in a step (beta1 = 0.9), and gradients are noisy:
  E4M3, with a spacing of 6 to 12 %, mostly follows;
* the second moves by (1 - beta2) of it, 0.1 to 5 %. In an 8-bit format, rounding to nearest returns the old value, so
  it stops early and too small, and the steps become too long; stochastic rounding in every step leaves noise as large
  as the value. float16, with 0.05 %, follows it.

Scales are powers of two, so that casting the decoded values gives the same values again: a checkpoint has the moments
in float32, any other run can load it, and resuming is exact. This trades accuracy for memory and is never a default:
`python -m benchmarks.adam_state` counts the bytes and shows the loss.

Rejected: torchao's AdamWFp8, both moments of which are E4M3. It compiles its step (a C++ compiler on CPU), needs the
learning rate as a tensor, where Megatron-Core's scheduler assigns a number, stores a step per parameter, with which
the distributed optimizer cannot resume, and leaves shards in float32 whose size is no multiple of 256. Rejected too:
Transformer Engine's precision-aware FusedAdam, with one scale a tensor, which is CUDA only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.adam import adam

from ...backends.base import CastRequest
from ...backends.reference import quantize
from ...kernels.cast_dispatch import block_amaxes
from ...numerics.formats import E4M3
from ...numerics.rule import Granularity, Rule
from ...numerics.scaling import FLT_MIN, round_down_to_power_of_two
from ...params.fp8_tensor_base import Fp8TensorBase
from ...tensor import QuantizedSide, expand_scale
from .. import environment as compat
from ..patches.patching import PatchList

BLOCK = Granularity(1, 128)
_RULE = Rule(E4M3, BLOCK, "pow2")
_HALF_MIN = 2.0**-24
_HALF_MAX = 2.0**15  # so that every value of a block stays below float16's largest number


class Adam(torch.optim.Optimizer):
    """Adam (``adam_w_mode``: with decoupled weight decay) with float32 parameters and state.

    Args:
        params: parameters or parameter groups; parameters without a gradient are skipped.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        adam_w_mode: decoupled weight decay; False adds it to the gradient.

    A parameter's state is ``exp_avg`` and ``exp_avg_sq``. ``step`` (an int) belongs to the group and counts its steps
    since it has parameters. NaN and Inf in a gradient enter the state as in torch.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Steps every group that has parameters; returns the result of ``closure``, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["params"]:
                self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        before = group.get("step", 0)
        group["step"] = before + 1
        params = [p for p in group["params"] if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        moments = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq")]
        self._update(group, before, params, *moments)

    def _update(
        self,
        group: dict[str, Any],
        before: int,
        params: list[torch.Tensor],
        exp_avgs: list[torch.Tensor],
        exp_avg_sqs: list[torch.Tensor],
    ) -> None:
        """Runs torch's own step on these parameters and float32 moments, in place, after ``before`` steps."""
        beta1, beta2 = group["betas"]
        # On GPUs fused, in one pass; torch's foreach implementation copies a moment of all parameters at once.
        devices = {p.device for p in params}
        fused = len(devices) == 1 and params[0].is_cuda
        device = params[0].device if fused else "cpu"
        steps = torch.full((len(params),), float(before), dtype=torch.float32, device=device)
        adam(
            params,
            [p.grad for p in params if p.grad is not None],
            exp_avgs,
            exp_avg_sqs,
            [],
            list(steps.unbind()),  # separate tensors: torch's function increments each
            foreach=False if fused else None,
            fused=fused or None,
            decoupled_weight_decay=self.adam_w_mode,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class Moment(Fp8TensorBase):
    """A moment of Adam: a float32 tensor of any shape, stored in 8 or 16 bits with one power-of-two scale for 128
    values.

    Args:
        value: float32.
        eight: E4M3 codes; else float16.

    NaN stays NaN. Inf becomes the largest code in E4M3, and stays Inf in float16.
    """

    _kept: list[torch.Tensor]
    _eight: bool

    @staticmethod
    def __new__(cls, value: torch.Tensor, eight: bool) -> Moment:
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=torch.float32, device=value.device)

    def __init__(self, value: torch.Tensor, eight: bool) -> None:
        super().__init__()
        self._eight, self._kept = eight, []
        self.write(value)

    def write(self, value: torch.Tensor) -> None:
        """Rounds a float32 tensor of this shape into codes and scales."""
        x = value.detach().to(torch.float32).reshape(1, -1)
        if self._eight:
            side = quantize(CastRequest(x, _RULE, "rowwise")).tensor.rowwise
            assert side is not None
            self._kept[:] = [side.codes, side.scale_inv]
            return
        (amax,), _ = block_amaxes(x, [(BLOCK.rows, BLOCK.cols)])
        scale = round_down_to_power_of_two((torch.full_like(amax, _HALF_MAX) / amax).clamp(FLT_MIN, 2.0**126))
        scale = torch.where((amax == 0) | amax.isinf(), torch.ones_like(scale), scale)
        codes = (x * expand_scale(scale, BLOCK, x.shape)).to(torch.float16)
        # Zero would make Adam divide by epsilon alone: too small values become the smallest number.
        codes.masked_fill_((codes == 0) & (x != 0), _HALF_MIN)
        self._kept[:] = [codes, 1 / scale]

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the moment, float32 by default."""
        codes, scale_inv = self._kept
        if self._eight:
            value = QuantizedSide(codes, scale_inv, BLOCK, pow2=True).dequantize(torch.float32)
        else:
            value = codes.to(torch.float32) * expand_scale(scale_inv, BLOCK, codes.shape)
        return value.view(self.shape).to(dtype or torch.float32)

    def alias(self) -> Moment:
        """The same moment, outside autograd."""
        other = torch.Tensor._make_wrapper_subclass(
            type(self), self.shape, dtype=self.dtype, device=self.device
        )
        other._kept, other._eight = self._kept, self._eight
        return other

    def stored_tensors(self) -> list[torch.Tensor]:
        """Returns codes and scales."""
        return list(self._kept)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Moment({tuple(self.shape)}, {'e4m3' if self._eight else 'float16'}, {self.device})"


class CompactAdam(Adam):
    """Adam with ``Moment``s as ``exp_avg`` and ``exp_avg_sq``; the same arguments.

    Moments that were loaded in float32 become compact at the next step.
    """

    def _step_group(self, group: dict[str, Any]) -> None:
        before = group.get("step", 0)
        group["step"] = before + 1
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            # One parameter's moments are float32 at a time.
            moments = [_value(state.get(name), p) for name in ("exp_avg", "exp_avg_sq")]
            self._update(group, before, [p], [moments[0]], [moments[1]])
            for name, moment, eight in zip(("exp_avg", "exp_avg_sq"), moments, (True, False), strict=True):
                if isinstance(state.get(name), Moment):
                    state[name].write(moment)
                else:
                    state[name] = Moment(moment, eight)


def _value(moment: torch.Tensor | None, p: torch.Tensor) -> torch.Tensor:
    """Returns a moment in float32, to be changed in place; zeros if there is none yet."""
    if moment is None:
        return torch.zeros_like(p)
    return moment.dequantize() if isinstance(moment, Moment) else moment


@contextmanager
def compact_state() -> Iterator[None]:
    """Inside, Megatron-Core makes optimizers with compact moments.

    Raises ValueError if Megatron-Core uses a fused Adam of another package.
    """
    from megatron.core import optimizer

    if optimizer.Adam is not Adam:
        raise ValueError(
            f"optimizer.state_dtype='fp8' replaces this package's own Adam, and Megatron-Core uses"
            f" {optimizer.Adam.__module__}.{optimizer.Adam.__name__} here: keep optimizer.state_dtype='float32'"
        )
    optimizer.Adam = CompactAdam
    try:
        yield
    finally:
        optimizer.Adam = Adam


def patches() -> PatchList:
    """Returns the patches that make Megatron-Core use this Adam; none on a GPU machine that has a fused one."""
    found = PatchList("megatron.core.optimizer")
    if (compat.has_cuda() and compat.has_te()) or compat.uses_apex("amp_C"):
        return found
    for name, replacement in {
        "Adam": Adam,
        "USING_PYTORCH_OPTIMIZER": False,
        "distrib_optimizer.Adam": Adam,
        "distrib_optimizer.HAVE_APEX_OR_TE": True,
        "distrib_optimizer.USING_TE_OPTIMIZER": True,
    }.items():
        why = "torch's AdamW counts steps per parameter, and the distributed optimizer cannot resume with it"
        found.replace(name, replacement, why)
    return found
