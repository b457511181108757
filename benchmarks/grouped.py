"""Experts' linears, grouped against one after the other and against BF16: `python benchmarks/grouped.py`.

An expert layer's two linears (gate and up in one, then down), forward and backward, on one rank: the router sends each
of 1,024 tokens to two of the experts, which therefore have unlike numbers of tokens. Weights are quantized anew in each
step, weight gradients are added to float32 main_grads. BF16 is measured twice, as torch's product of each expert and
as torch's grouped product; what Megatron-Core's SequentialMLP does is the first. Between the linears stands nothing:
SwiGLU would be the same for all. Goal: a grouped FP8 step <= 1.25 x the faster of the BF16 steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import (
    argument_parser,
    clock_of,
    command_line,
    describe,
    environment,
    interleave,
    keep_memory,
    table,
    write_results,
)
from megatron_fp8.kernels.cpu import emulation
from megatron_fp8.linear.function import fp8_linear, grouped_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.plan.site_plan import fp8_site
from megatron_fp8.recipe import RECIPES as RECIPE_CLASSES
from megatron_fp8.state.fp8_state import Fp8State

RECIPES = ("rowwise", "blockwise", "mxfp8", "tensorwise", "delayed")
TOKENS, TOP_K = 1024, 2
SHAPES = {"8 x 512": (8, 512, 512), "32 x 512": (32, 512, 256), "8 x 1024": (8, 1024, 1024)}
"""Name -> experts, hidden size, and the experts' own size."""
GOAL = 1.25

Linear = Callable[[torch.Tensor, Sequence[torch.Tensor], list[int], Any], torch.Tensor]


def in_turn(x: torch.Tensor, weights: Sequence[torch.Tensor], tokens: list[int], sites: Any) -> torch.Tensor:
    """FP8, one expert after the other."""
    parts = zip(x.split(tokens), weights, sites, strict=True)
    return torch.cat([fp8_linear(part, weight, None, site) for part, weight, site in parts])


def bf16_in_turn(x: torch.Tensor, weights: Sequence[torch.Tensor], tokens: list[int], _: Any) -> torch.Tensor:
    """BF16, one expert after the other."""
    return torch.cat([part @ weight.t() for part, weight in zip(x.split(tokens), weights, strict=True)])


def bf16_grouped(x: torch.Tensor, weights: Sequence[torch.Tensor], tokens: list[int], _: Any) -> torch.Tensor:
    """torch's grouped product: of one weight [experts, N, K]."""
    ends = torch.tensor(tokens, device="cpu", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.nn.functional.grouped_mm(x, weights[0].transpose(1, 2), offs=ends)


class Contender:
    """Two linears of some experts, and their step."""

    def __init__(
        self, linear: Linear, recipe: str | None, shape: tuple[int, int, int], *, stacked: bool = False
    ):
        experts, hidden, own = shape
        generator = torch.Generator().manual_seed(1)

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).bfloat16()

        sizes = {"fc1": (2 * own, hidden), "fc2": (hidden, own)}
        self.linear, self.state = linear, Fp8State()
        shares = torch.randint(experts, (TOKENS * TOP_K,), generator=generator)
        self.tokens: list[int] = shares.bincount(minlength=experts).tolist()
        self.x, self.dy = randn(TOKENS * TOP_K, hidden), randn(TOKENS * TOP_K, hidden)
        self.weights: dict[str, list[Any]] = {}
        self.sites: dict[str, list[GemmSite]] = {}
        for name, size in sizes.items():
            each = [randn(*size) for _ in range(experts)]
            made = [torch.stack(each)] if stacked else each
            self.weights[name] = [torch.nn.Parameter(weight * 0.03) for weight in made]
            for weight in self.weights[name]:
                weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device="cpu")
                if recipe is not None:
                    weight.grad_added_to_main_grad = False
            if recipe is not None:
                plans = [
                    fp8_site(f"{e}.{name}", None, RECIPE_CLASSES[recipe](), "emulated", "benchmark")
                    for e in range(experts)
                ]
                self.sites[name] = [GemmSite(plan, self.state, None) for plan in plans]
        self.dx = torch.empty(0, dtype=torch.bfloat16, device="cpu")

    def step(self) -> None:
        """Forward, backward, gradients added up, the iteration's end."""
        x = self.x.detach().requires_grad_()
        own = self.weights["fc2"][0].shape[-1]
        middle = self.linear(x, self.weights["fc1"], self.tokens, self.sites.get("fc1"))[:, :own].contiguous()
        self.linear(middle, self.weights["fc2"], self.tokens, self.sites.get("fc2")).backward(self.dy)
        for weight in (weight for weights in self.weights.values() for weight in weights):
            if not getattr(weight, "grad_added_to_main_grad", False):
                weight.main_grad.add_(weight.grad)
            weight.grad = None
        assert x.grad is not None
        self.dx = x.grad
        self.state.finish_iteration()


def contenders(shape: tuple[int, int, int], recipes: Sequence[str]) -> dict[str, Contender]:
    """By name; each FP8 pair, grouped and not, gave the same bits, near BF16's."""
    found = {
        "bf16, in turn": Contender(bf16_in_turn, None, shape),
        "bf16, grouped": Contender(bf16_grouped, None, shape, stacked=True),
    }
    for recipe in recipes:
        found[f"{recipe}, grouped"] = Contender(grouped_linear, recipe, shape)
        found[f"{recipe}, in turn"] = Contender(in_turn, recipe, shape)
    for each in found.values():
        each.step()
    plain = found["bf16, in turn"].dx.float()
    for recipe in recipes:
        grouped, alone = found[f"{recipe}, grouped"], found[f"{recipe}, in turn"]
        assert torch.equal(grouped.dx, alone.dx), f"{recipe}: grouped and in turn differ"
        apart = float((grouped.dx.float() - plain).norm() / plain.norm())
        assert apart < 0.1, f"{recipe}: {apart:.1%} from BF16"
    return found


def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Gate, then time, all contenders of one shape; a result for each."""
    made = contenders(SHAPES[name], args.recipes)
    steps = {each: contender.step for each, contender in made.items()}
    times = interleave(steps, args.repetitions, warmup=1, clock=clock_of(args)[0])
    plain = min(
        (times[each] for each in times if each.startswith("bf16")), key=lambda t: statistics.median(t.seconds)
    )
    results = []
    for each, timing in times.items():
        ratio, spread = timing.ratio_to(plain)
        goal = GOAL if each.endswith("grouped") and not each.startswith("bf16") else None
        results.append(
            {
                "shape": name,
                "step": each,
                "seconds": timing.seconds,
                "ratio": ratio,
                "spread": spread,
                "goal": goal,
            }
        )
    return results


def row_of(result: dict[str, Any]) -> list[str]:
    """One line of the table."""
    goal, milliseconds = result["goal"], statistics.median(result["seconds"]) * 1e3
    verdict = "" if goal is None else f"<= {goal:.2f} {'met' if result['ratio'] <= goal else 'MISSED'}"
    shown = [f"{milliseconds:.1f}", f"{result['ratio']:.2f}", f"{result['spread']:.0%}"]
    return [result["shape"], result["step"], *shown, verdict]


def main() -> int:
    """Gate, time, print; exit code 1 where a goal is missed."""
    parser = argument_parser((__doc__ or "").splitlines()[0], repetitions=9)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    record = environment([])
    record["measured"] = clock_of(args)[1]
    print(
        describe(record), "with AMX" if emulation.inner_loop() == emulation.AMX else "without AMX", flush=True
    )
    data: list[dict[str, Any]] = []
    for name in args.shapes:
        data += measure(name, args)
    body = table(
        ["experts x hidden", "step", "ms", "x bf16", "spread", "goal"], [row_of(each) for each in data]
    )
    print(body)
    if args.write:
        write_results("grouped", "Experts' linears on CPU", command_line(), record, body, data)
    return int(any(each["goal"] is not None and each["ratio"] > each["goal"] for each in data))


if __name__ == "__main__":
    raise SystemExit(main())
