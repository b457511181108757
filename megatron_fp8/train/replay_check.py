"""Checks that a replay computes what the run computed.

A checkpoint fits any parallel layout, but a scale computed from a shard's own values does not: with ``tensorwise`` a
weight split in two has two scales. Delayed scales come from the checkpoint and are shared by all ranks, and blocks do
not cross shards, so those recipes give the same result in every layout. Rejected: refuse every other layout; a
diagnosis on one process is right for those recipes, and needs no second rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files.jsonl import read_lines
from ..plan.site_plan import SitePlan
from ..recipe import recipe_name

_OF_SHARDS = ("tensorwise", "rowwise", "custom")
_CUTS = {
    "tensor": "tensor_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
}
_SAME_NUMBERS = (
    *_CUTS.values(),
    "pipeline_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "moe_grouped_gemm",
    "fp8_backend",
    "fp8_quantizer_factory",
)
"""Options of the model that do not change a run's numbers, except for scales of shards."""
_NEAR = 0.02
"""Relative difference below which losses count as equal: sums have another order, dropout is drawn again."""


@dataclass(frozen=True)
class OtherShards:
    """The run split its tensors differently from this launch, and has separate scales for each shard.

    Attributes:
        recipes: the recipes with such scales.
        sizes: kind of parallelism -> (the run's size, this launch's).
        ranks: least number of ranks for the run's layout.
        asked: whether the options set this launch's layout explicitly.
    """

    recipes: list[str]
    sizes: Mapping[str, tuple[int, int]]
    ranks: int
    asked: bool

    def line(self) -> str:
        """One line for the user."""
        sizes = ", ".join(f"{kind} {here} and not {run}" for kind, (run, here) in self.sizes.items())
        recipes = " and ".join(self.recipes)
        return f"not the run's layout (parallel sizes: {sizes}): {recipes} scales belong to other shards"

    def refusal(self, arguments: str, told: str) -> ValueError:
        """``arguments``: the command's arguments as given; ``told``: the known difference, or ''."""
        size = next(iter(self.sizes))
        return ValueError(
            f"{self.line()}{told}. Run it as megatron-fp8 launch --ranks {self.ranks} diagnose"
            f" {arguments}; or add --model.{_CUTS[size]}={self.sizes[size][1]} to ask what this layout would cost"
        )


def other_shards(
    saved: Mapping[str, Any], model: Any, plans: Iterable[SitePlan], options: Iterable[str]
) -> OtherShards | None:
    """Return OtherShards if this launch has different scales than the run had, else None.

    Args:
        saved: the manifest's layout; empty: unknown.
        model: the model section, in this launch's layout.
        plans: plans of all sites.
        options: command-line options.
    """
    sizes = {
        kind: (saved[kind], getattr(model, name))
        for kind, name in _CUTS.items()
        if saved.get(kind) is not None and saved[kind] != getattr(model, name)
    }
    names = {recipe_name(plan.recipe) for plan in plans if plan.recipe is not None}
    recipes = [name for name in _OF_SHARDS if name in names]
    if not sizes or not recipes:
        return None
    option_names = [option.partition("=")[0] for option in options]
    # Data-parallel ranks hold the same weights; they are needed only if they hold different experts.
    copies = saved.get("data", 1) if saved.get("expert", 1) > 1 else 1
    ranks = math.prod(saved.get(kind) or 1 for kind in ("tensor", "pipeline", "context")) * copies
    requested = any(f"--model.{_CUTS[kind]}" in option_names for kind in sizes)
    return OtherShards(recipes, sizes, ranks, requested)


def recorded_loss(
    run_folder: Path, iteration: int, saved_model: Mapping[str, Any], options: Iterable[str]
) -> float | None:
    """The loss that the run recorded for an iteration, if a replay with these options should reproduce it; else None.

    Args:
        saved_model: the model section of the run.

    With warm-up or healing the run may have computed it in high precision, which a replay does not.
    """
    option_names = (option.partition("=")[0].removeprefix("--model.") for option in options)
    if any(name not in _SAME_NUMBERS and not name.startswith("--checkpoint.") for name in option_names):
        return None
    if not saved_model.get("fp8") or any(
        saved_model.get(f"fp8_high_precision_{phase}") for phase in ("warmup", "healing")
    ):
        return None
    for line in read_lines(run_folder / "metrics.jsonl"):
        if line.content.get("iteration") == iteration and line.content.get("lm_loss") is not None:
            loss = line.number_of("lm_loss")
            return loss if loss is not None and math.isfinite(loss) else None
    return None


def is_near(loss: float, recorded: float, spread: float = 0.0) -> bool:
    """Whether a replayed loss matches the recorded one; ``spread``: standard deviation of losses between batches."""
    return abs(loss - recorded) <= max(3 * spread, _NEAR * abs(recorded))


def unlike(loss: float, recorded: float, iteration: int, spread: float) -> str:
    """The first sentences of a verdict if this replay's loss differs from the run's; '' if it does not."""
    if is_near(loss, recorded, spread):
        return ""
    return (
        f"This is not what the run computed: as planned the loss of iteration {iteration} is {loss:.4g}, and the run"
        f" recorded {recorded:.4g}. The rest holds for this checkpoint in this layout: check that both are the run's."
    )
