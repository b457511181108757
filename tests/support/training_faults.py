"""Faults planted in a small GPT while it trains: of precision, which FP8 alone feels, and of the model, which BF16 has.

Faults of precision leave what the model computes in BF16 as it is: a channel that is made huge meets weights that are
zero and stay so, and what is made larger before a product is made as much smaller after it. So a training in BF16 with
the same fault is the yardstick of one in FP8.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
import yaml

from benchmarks.support.fp8_gpt import fp8_config, record_steps
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, model_parallel
from tests.support.diagnosis_cases import SEQUENCE, SMALL, VOCAB, Sequences

STEPS = 14
BATCH: dict[str, Any] = {"sequence": SEQUENCE, "vocab": VOCAB, "micro_batch": 2, "global_batch": 2}
SITES = [
    f"decoder.layers.{layer}.{name}"
    for layer in (0, 1)
    for name in (
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    )
]
OF_PRECISION = ("outlier", "gradient", "remembered", "outgrown", "coarse")
OF_THE_MODEL = ("nan", "spikes", "learning rate")


@dataclass(frozen=True)
class Fault:
    """What is planted. ``size``: a factor; ``start``: the first iteration with it; ``fields``: of the config.

    Kinds: 'outlier', one channel of the input grows ``rate`` times in each iteration, up to size; 'gradient', one channel
    of the output's gradient is so large that E4M3 loses the others; 'remembered', one iteration's input is that large,
    and a delayed scale remembers it; 'outgrown', every second input is that large, and the scale is the last one's;
    'coarse', tokens differ by up to that, under one scale; 'nan', a weight becomes NaN; 'spikes', every ``rate``-th
    gradient is that large; 'learning rate', it is that many times what it was.
    """

    kind: str
    site: str
    size: float
    start: int
    rate: int = 1
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """The tensor that it is in."""
        return {"gradient": "grad_output", "nan": "weight"}.get(self.kind, "input")


def drawn(seed: int) -> Fault:
    """A fault: kinds in turn, everything else by chance."""
    chance = random.Random(seed)
    kind = (*OF_PRECISION, *OF_THE_MODEL)[seed % 8]
    site, start = chance.choice(SITES), chance.randint(3, 6)
    size, rate = 2.0 ** chance.randint(*_SIZES[kind]), chance.randint(*_RATES.get(kind, (1, 1)))
    fields: dict[str, Any] = {"fp8_format": chance.choice(_RECIPES.get(kind, ("tensorwise",)))}
    if kind == "gradient":
        fields["fp8"] = "e4m3"
    if kind == "remembered":
        fields |= {"fp8_amax_compute_algo": "max", "fp8_amax_history_len": chance.choice((16, 64, 1024))}
    if kind == "outgrown":
        fields |= {"fp8_amax_compute_algo": "most_recent", "fp8_amax_history_len": 1}
    if kind == "spikes":
        start = rate
    if kind == "learning rate":
        start = 9
    if kind == "outgrown":
        start |= 1  # after the last iteration, which is even, its scale is too small
    return Fault(kind, site, size, start, rate, fields)


_SIZES = {
    "outlier": (16, 20), "gradient": (14, 20), "remembered": (15, 18), "outgrown": (3, 6), "coarse": (21, 26),
    "nan": (0, 0), "spikes": (4, 10), "learning rate": (7, 10),
}  # fmt: skip
_RATES = {"outlier": (8, 64), "spikes": (3, 4)}
_RECIPES = {
    "outlier": ("tensorwise", "rowwise", "blockwise", "mxfp8"),
    "gradient": ("tensorwise", "rowwise"),
    "remembered": ("delayed",),
    "outgrown": ("delayed",),
    "nan": ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"),
    "spikes": ("tensorwise", "rowwise", "blockwise", "mxfp8"),
    "learning rate": ("tensorwise", "rowwise", "blockwise", "mxfp8"),
}


class _Times(torch.autograd.Function):
    """x times a factor, the gradient times another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: Any, backward: Any) -> torch.Tensor:
        ctx.factor = backward
        return x * factor

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return dy * ctx.factor, None, None


class _HugeChannel(torch.autograd.Function):
    """The gradient of one channel becomes ``factor`` times the largest gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, channel: int, factor: float) -> torch.Tensor:
        ctx.channel, ctx.factor = channel, factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        dy = dy.clone()
        dy[..., ctx.channel] = dy.abs().max() * ctx.factor
        return dy, None, None


class Planted:
    """A fault in a model, before its optimizer is made.

    Attributes:
        iteration: the one that runs; the caller counts it.
        lost: of an outlier, by iteration: the share of its tensor that E4M3 makes zero, in percent, with a scale of half
            and of twice what it has to be.
    """

    CHANNEL = 5

    def __init__(self, fault: Fault, chunks: list[Any]):
        from megatron_fp8.mcore.runtime import unwrap

        self.fault, self.iteration = fault, 1
        self.lost: dict[int, tuple[float, float]] = {}
        layers: Any = unwrap(chunks[0]).decoder.layers
        number, _, name = fault.site.removeprefix("decoder.layers.").partition(".")
        self.linear = layers[int(number)].get_submodule(name)
        weight = self.linear.weight
        if fault.kind in ("outlier", "gradient"):
            alive = torch.ones_like(weight)
            (alive if fault.kind == "gradient" else alive.T)[self.CHANNEL] = 0
            weight.data.mul_(alive)
            self._change_gradient(weight, lambda: alive)
        elif fault.kind in ("remembered", "outgrown", "coarse"):
            self._change_gradient(weight, lambda: 1 / self.factor().max().to(weight))
        if fault.kind == "spikes":
            layers[-1].register_forward_hook(self._spike)
        else:
            self.linear.register_forward_pre_hook(self._before)
            self.linear.register_forward_hook(self._after)

    @staticmethod
    def _change_gradient(weight: Any, factor: Callable[[], torch.Tensor]) -> None:
        """Of a linear in FP8 wgrad is in main_grad before autograd has a gradient, which is then a dummy."""

        def change(gradient: torch.Tensor) -> torch.Tensor:
            if not weight.grad_added_to_main_grad:
                return gradient * factor()
            weight.main_grad.mul_(factor())
            return gradient

        weight.register_hook(change)

    @property
    def on(self) -> bool:
        """Whether this iteration has it."""
        fault, past = self.fault, self.iteration - self.fault.start
        every = {"remembered": STEPS * 9, "outgrown": 2, "spikes": fault.rate}.get(fault.kind, 1)
        return past >= 0 and past % every == 0

    def factor(self) -> torch.Tensor:
        """Of the input: [1], or [sequence, 1, 1] where tokens differ; powers of two."""
        if not self.on:
            return torch.ones(1, dtype=torch.bfloat16, device="cpu")
        if self.fault.kind != "coarse":
            return torch.tensor([self.fault.size], dtype=torch.bfloat16, device="cpu")
        spread = torch.linspace(0, 1, SEQUENCE, dtype=torch.float64, device="cpu")
        mixed = spread[torch.randperm(SEQUENCE, generator=torch.Generator().manual_seed(self.fault.start))]
        return (self.fault.size**mixed).log2().round().exp2().to(torch.bfloat16).reshape(-1, 1, 1)

    def _before(self, _: Any, args: Any) -> Any:
        x, kind = args[0], self.fault.kind
        if kind == "outlier" and self.on:
            grown = min(self.fault.size, float(self.fault.rate) ** (self.iteration - self.fault.start + 1))
            factor = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
            factor[self.CHANNEL] = grown
            x = x * factor
            if self.iteration <= STEPS:
                self.lost[self.iteration] = _lost(x, self.fault.fields["fp8_format"])
        elif kind in ("remembered", "outgrown", "coarse"):
            x = _Times.apply(x, self.factor(), 1.0)
        return (x, *args[1:])

    def _after(self, _: Any, args: Any, y: Any) -> Any:
        out, kind = y[0], self.fault.kind
        if kind == "gradient" and self.on:
            out = _HugeChannel.apply(out, self.CHANNEL, self.fault.size)
        elif kind in ("remembered", "outgrown", "coarse"):
            out = _Times.apply(out, 1 / self.factor(), 1.0)
        return (out, *y[1:])

    def _spike(self, _: Any, args: Any, y: Any) -> Any:
        return (_Times.apply(y[0], 1.0, self.fault.size if self.on else 1.0), *y[1:])


def _lost(x: torch.Tensor, recipe: str) -> tuple[float, float]:
    size = {"tensorwise": x.numel(), "mxfp8": 32}.get(recipe, min(x.shape[-1], 128))
    blocks = x.detach().double().abs().reshape(-1, size)
    smallest = blocks.amax(1, keepdim=True) / 448 / 2**10  # half the smallest subnormal becomes zero
    few, many = (100 * ((blocks <= smallest * times) & (blocks > 0)).double().mean() for times in (0.5, 2.0))
    return float(few), float(many)


@dataclass
class Trial:
    """What a training showed. ``advice``: as it is made from telemetry; ``moves``: the guard's; ``found``: a diagnosis;
    ``lost``: as Planted's."""

    losses: list[float]
    norms: list[float]
    advice: list[Any]
    first_bad: dict[tuple[str, str, str], int]
    records: list[dict[str, Any]]
    moves: list[Any]
    found: dict[str, Any] | None
    lost: dict[int, tuple[float, float]]

    @property
    def loss(self) -> float:
        """The mean of the last four."""
        return fmean(self.losses[-4:])


def trial(
    fault: Fault | None, recipe: str | None, fields: dict[str, Any], seed: int, passes: int = 400
) -> Trial:
    """A rank case: trains with the fault, telemetry on; recipe None: in BF16, without. ``passes``: of a diagnosis."""
    from megatron_fp8.diagnosis.advice import advise
    from megatron_fp8.mcore.report import site_report
    from megatron_fp8.mcore.sites import state_of
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
    from megatron_fp8.telemetry import Telemetry

    with model_parallel(Layout(), seed=seed):
        config = fp8_config(Layout(), recipe, **{**SMALL, **fields})
        chunks = build_chunks(
            config, spec=get_gpt_layer_fp8_spec, sequence=SEQUENCE, vocab=VOCAB, seed=seed
        )  # fmt: skip
        planted = Planted(fault, chunks) if fault is not None else None
        optimizer = build_optimizer(config, chunks)
        record_steps(optimizer, [])  # a step that is skipped for its NaN is no failure here
        seen = Trial([], [], [], {}, [], [], None, planted.lost if planted else {})
        what_if = ("tensorwise", "blockwise", "mxfp8")
        telemetry = Telemetry(chunks, every=1, what_if=what_if, say=str) if recipe else None
        for iteration in range(1, STEPS + 1):
            if planted is not None:
                planted.iteration = iteration
                _disturb(planted, optimizer)
            loss, norm = train_step(config, chunks, optimizer, iteration, **BATCH)
            seen.losses.append(loss)
            seen.norms.append(norm)
            seen.records += telemetry.records if telemetry else []
        if telemetry is None:
            return seen
        seen.first_bad = telemetry.first_bad
        telemetry.close()
        report = {
            "precision": {"fp8": config.fp8, "fp8_recipe": config.fp8_recipe},
            "sites": site_report(chunks),
        }
        metrics = [
            {"iteration": i, "lm_loss": loss, "grad_norm": norm}
            for i, (loss, norm) in enumerate(zip(seen.losses, seen.norms, strict=True), start=1)
        ]
        seen.advice = advise(seen.records, report, metrics)
        state = state_of(config)
        seen.moves = list(state.guard.moves.values()) if state.guard else []
        if planted is not None:
            planted.iteration = _next(planted)
        if passes:
            seen.found = _diagnosed(chunks, state, seen.losses, passes)
        return seen


def _disturb(planted: Planted, optimizer: Any) -> None:
    fault = planted.fault
    if planted.iteration != fault.start:
        return
    if fault.kind == "nan":
        planted.linear.weight.data.view(-1)[0] = torch.nan
    if fault.kind == "learning rate":
        for group in optimizer.param_groups:
            group["lr"] *= fault.size


def _next(planted: Planted) -> int:
    """The next iteration with the fault."""
    planted.iteration = STEPS + 1
    while planted.fault.kind != "remembered" and not planted.on:
        planted.iteration += 1
    return planted.iteration


def _diagnosed(chunks: list[Any], state: Any, losses: list[float], passes: int) -> dict[str, Any]:
    from megatron_fp8.diagnosis.attribution import Limits
    from megatron_fp8.diagnosis.checkpoint_runner import CheckpointRunner
    from megatron_fp8.diagnosis.diagnosis import diagnose_runner
    from megatron_fp8.train.config.run_config import RunConfig

    run = RunConfig()
    run.train.micro_batch_size, run.train.global_batch_size, run.train.seq_length = 1, 1, SEQUENCE
    good = min(fmean(losses[i : i + 4]) for i in range(len(losses) - 3))
    runner = CheckpointRunner(run, chunks, Sequences(), 0, 4, loss_scale=1.0)
    with runner.unrecorded():
        return diagnose_runner(runner, 0.9, passes, good, Limits(refined=1), lambda _: None).as_dict()


def applied(advice: list[Any]) -> dict[str, Any]:
    """The fields of the config that the lines of some advice say."""
    fields: dict[str, Any] = {}
    for piece in advice:
        for option in shlex.split(piece.line):
            name, _, value = option.removeprefix("--model.").partition("=")
            given = yaml.safe_load(value)
            fields[name] = {**fields.get(name, {}), **given} if isinstance(given, dict) else given
    return fields
