"""FP8 training in one file: two recipes, a linear with its three GEMMs, a training loop. Read it from top to bottom.

    python examples/fp8_in_200_lines.py            # trains in float32, with delayed scaling and in MXFP8
    python examples/fp8_in_200_lines.py --check    # and compares every byte with megatron_fp8's

Only the last function imports megatron_fp8. docs/numerics.md says each rule to the bit, and what is left out here: NaN,
Inf, partial blocks, ranks, and hardware that multiplies codes. Here a product is of the codes' values, in float32.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
FORMAT = {"input": E4M3, "weight": E4M3, "grad_output": E5M2}
"""'hybrid': gradients need E5M2's range, activations and weights E4M3's third bit of mantissa."""


def cast(x: Tensor, scale: Tensor, fmt: torch.dtype) -> Tensor:
    """Codes: x * scale in float32, clamped to the largest value, rounded to nearest even."""
    return (x.float() * scale).clamp(-LARGEST[fmt], LARGEST[fmt]).to(fmt)


class Quantized(NamedTuple):
    """codes [rows, cols], one byte each, and what they are multiplied by on the way out."""

    codes: Tensor
    scale_inv: Tensor

    def values(self) -> Tensor:
        """float32 [rows, cols]: one scale_inv for all, or one for each run of codes along cols."""
        per_code = self.scale_inv.float()
        if per_code.dim():
            per_code = per_code.repeat_interleave(self.codes.shape[1] // per_code.shape[1], dim=1)
        return self.codes.float() * per_code


def scale_of(amax: Tensor, fmt: torch.dtype) -> Tensor:
    """The scale that takes amax to the format's largest value; 1 where there is nothing to scale."""
    scale = torch.full_like(amax, LARGEST[fmt]) / amax  # torch's `448.0 / amax` rounds twice
    return torch.where(amax > 0, scale.clamp(max=torch.finfo(torch.float32).max), 1.0)


class DelayedSlot:
    """Recipe 1, delayed scaling, of one tensor of a layer: the scale in use, and the amaxes of past iterations.

    A tensor's own amax is known once all of it was read. Delayed scaling takes that of earlier iterations, so that amax
    and cast need one pass; what grew since saturates. The first iteration has no past, and takes the tensor's own amax.
    """

    def __init__(self, role: str, iterations: int = 16):
        self.fmt = FORMAT[role]
        self.history = torch.zeros(iterations)  # row 0: this iteration's
        self.scale: Tensor | None = None

    def both(self, x: Tensor) -> tuple[Quantized, Quantized]:
        """x [rows, cols] for a product that sums over cols, and x transposed for one that sums over rows."""
        amax = x.abs().max().float()
        self.history[0] = torch.maximum(self.history[0], amax)
        scale = scale_of(amax, self.fmt) if self.scale is None else self.scale
        codes = cast(x, scale, self.fmt)
        return Quantized(codes, 1 / scale), Quantized(codes.t(), 1 / scale)  # one scale: the same codes

    def end_iteration(self) -> None:
        """Once an iteration, whatever the number of casts: a new scale, and room for the next amax."""
        if self.history[0] > 0:  # else it was not cast
            self.scale = scale_of(self.history.max(), self.fmt)
            self.history = self.history.roll(-1)
            self.history[0] = 0.0


class MXSlot:
    """Recipe 2, MXFP8: blocks of 32 values along the dimension that a product sums over. There is no state.

    A scale is E8M0: the exponent of a float32 and nothing else, one byte. It is rounded up, so that nothing saturates.
    """

    def __init__(self, role: str):
        self.fmt = FORMAT[role]

    def quantize(self, x: Tensor) -> Quantized:
        """x [rows, cols], cols a multiple of 32."""
        blocks = x.float().reshape(x.shape[0], -1, 32)
        bits = blocks.abs().amax(dim=2).view(torch.int32)
        largest = 8 if self.fmt == E4M3 else 15  # 448 = 1.75 * 2^8, 57344 = 1.75 * 2^15
        above = (bits & 0x7FFFFF) > 0x600000  # a mantissa above .75
        e8m0 = ((bits >> 23) - largest + above).clamp(0, 254)
        scale = torch.ldexp(torch.ones(e8m0.shape), 127 - e8m0)
        codes = cast(blocks, scale[:, :, None], self.fmt).reshape(x.shape)
        return Quantized(codes, e8m0.to(torch.uint8).view(torch.float8_e8m0fnu))

    def both(self, x: Tensor) -> tuple[Quantized, Quantized]:
        """As DelayedSlot's. Blocks run along the sum: both sides have blocks of their own, and are cast from x."""
        return self.quantize(x), self.quantize(x.t())

    def end_iteration(self) -> None:
        """There is no state to update."""


SLOTS: dict[str, Any] = {"delayed": DelayedSlot, "mxfp8": MXSlot}


class LinearFunction(torch.autograd.Function):
    """Three GEMMs. Each sums over another dimension, so each operand is needed both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, slots: dict[str, Any]) -> Tensor:
        """fprop: y [tokens, out] = x [tokens, in] by weight [out, in], over in."""
        x_rows, x_columns = slots["input"].both(x)
        w_rows, w_columns = slots["weight"].both(weight)
        ctx.save_for_backward(*x_columns, *w_columns)  # one byte a value, where BF16 keeps two
        ctx.slots = slots
        return x_rows.values() @ w_rows.values().t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        """dgrad: dy by weight, over out. wgrad: dy by x, over tokens."""
        saved = ctx.saved_tensors
        x_columns, w_columns = Quantized(*saved[:2]), Quantized(*saved[2:])
        dy_rows, dy_columns = ctx.slots["grad_output"].both(dy)
        dx = dy_rows.values() @ w_columns.values().t()
        dw = dy_columns.values() @ x_columns.values().t()
        return dx, dw, None


class Linear(nn.Linear):
    """nn.Linear whose products are of FP8 codes. The weight stays in float32 and is quantized at each call."""

    def __init__(self, features: int, out: int, recipe: str):
        super().__init__(features, out, bias=False)
        self.slots = {role: SLOTS[recipe](role) for role in FORMAT}

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, in]."""
        return LinearFunction.apply(x, self.weight, self.slots)


def train(recipe: str | None, iterations: int = 60) -> float:
    """Learn a fixed function of random inputs with two layers; the mean loss of the last ten iterations."""
    torch.manual_seed(0)
    teacher = torch.randn(64, 64) / 8
    sizes = ((64, 128), (128, 64))
    first, second = (Linear(*s, recipe) if recipe else nn.Linear(*s, bias=False) for s in sizes)
    model = nn.Sequential(first, nn.GELU(), second)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(iterations):
        x = torch.randn(256, 64)
        loss = (model(x) - (x @ teacher).tanh()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for slot in (slot for layer in model for slot in getattr(layer, "slots", {}).values()):
            slot.end_iteration()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def check() -> str:
    """Codes, scales and five iterations' histories, compared with megatron_fp8's. AssertionError if a byte differs."""
    from megatron_fp8 import convert_to_fp8, fp8_step, quantize
    from megatron_fp8.nn import fp8_state_dict
    from megatron_fp8.recipe import DelayedScaling, Format, MXFP8BlockScaling

    pairs: list[tuple[Tensor, Tensor]] = []
    for role in FORMAT:
        for size in (1e-6, 1.0, 1e4):
            x = torch.randn(96, 64) * torch.randn(96, 64).exp() * size
            theirs: Any = quantize(x, MXFP8BlockScaling(Format.HYBRID), role, "both")
            for mine, side in zip(MXSlot(role).both(x), theirs.sides, strict=True):
                pairs += [(mine.codes, side.codes), (mine.scale_inv, side.scale_inv)]
    layer, slots = nn.Linear(64, 32, bias=False), {role: DelayedSlot(role, 4) for role in FORMAT}
    with redirect_stdout(None):  # its table
        model = convert_to_fp8(nn.Sequential(layer), DelayedScaling(amax_history_len=4))
    for iteration in range(5):
        x, dy = torch.randn(32, 64) * 3**iteration, torch.randn(32, 32) / 3**iteration
        model(x).backward(dy)
        fp8_step(model)
        for (role, slot), cast_now in zip(slots.items(), (x, layer.weight.detach(), dy), strict=True):
            slot.both(cast_now)
            slot.end_iteration()
            for name, tensor in (("amax_history", slot.history), ("scale", torch.as_tensor(slot.scale))):
                pairs.append((tensor.clone(), fp8_state_dict(model)[f"0.{role}.{name}"].clone()))
    for ours, other in pairs:
        assert torch.equal(ours.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    return f"{sum(ours.nbytes for ours, _ in pairs):,} bytes are megatron_fp8's"


if __name__ == "__main__":
    for name in (None, *SLOTS):
        print(f"{name or 'float32':8} loss {train(name):.4f}")
    if "--check" in sys.argv[1:]:
        print(check())
