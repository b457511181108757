"""Convert a PyTorch model to FP8 and train it for a moment, beside the same model in its own precision.

    python examples/convert_model.py                    # 'tensorwise'
    python examples/convert_model.py --recipe mxfp8     # delayed, rowwise, blockwise

A small language model of ordinary torch modules learns to continue this file, letter by letter. Runs on a CPU in seconds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from megatron_fp8.nn import convert_to_fp8, fp8_autocast, register_fp8_step

WIDTH, HEADS, LAYERS, CONTEXT = 64, 4, 2, 32


class Block(nn.Module):
    """Causal attention and a gated MLP, each on its own normalised input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 6 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Letters(nn.Module):
    """A language model over bytes; the output projection shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.final_norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.final_norm(x))


def loss_of(model: nn.Module, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next byte, over windows of the text."""
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(recipe: str | None, steps: int) -> tuple[list[float], nn.Module, float]:
    """(losses, model, seconds) of a model made from the same seed, trained on the same windows."""
    torch.manual_seed(0)
    model = Letters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if recipe is not None:
        convert_to_fp8(model, recipe)  # 1. in place; the optimizer may exist already
        register_fp8_step(optimizer, model)  # 2. scales and histories, once an iteration
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8)
    windows = torch.Generator().manual_seed(1)
    losses, began = [], time.perf_counter()
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (16,), generator=windows)
        loss = loss_of(model, text, starts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, time.perf_counter() - began


def main() -> None:
    """Train twice and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipe", default="tensorwise", help="tensorwise, delayed, rowwise, blockwise or mxfp8"
    )
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    mine, model, fp8_seconds = train(options.recipe, options.steps)
    plain, _, seconds = train(None, options.steps)
    print(f"\n{'step':>6} {'float32':>9} {options.recipe:>11}")
    for step in range(0, options.steps, max(1, options.steps // 6)):
        print(f"{step + 1:>6} {plain[step]:>9.4f} {mine[step]:>11.4f}")
    ends = [sum(losses[-5:]) / len(losses[-5:]) for losses in (plain, mine)]
    print(f"{'end':>6} {ends[0]:>9.4f} {ends[1]:>11.4f}   mean of the last 5")
    print(
        f"seconds{seconds:>9.1f} {fp8_seconds:>11.1f}   emulated on this CPU: the numbers of FP8, not its speed"
    )

    tokens = torch.arange(CONTEXT)[None] + 32
    with torch.no_grad():
        fp8 = model.eval()(tokens)
        with fp8_autocast(enabled=False):
            exact = model(tokens)
    error = (fp8 - exact).norm() / exact.norm()
    print(f"one forward in FP8 differs from the same weights' in float32 by {error:.1%} of the logits' size")


if __name__ == "__main__":
    main()
