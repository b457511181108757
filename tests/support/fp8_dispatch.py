"""A layer of experts whose tokens are sent in FP8, for tests."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.support.gpt import gpt_config
from benchmarks.support.ranks import Layout, model_parallel
from tests.support.collectives import recorded

HIDDEN, SEQUENCE = 256, 96
MOE = {
    "hidden_size": HIDDEN,
    "ffn_hidden_size": 256,
    "moe_ffn_hidden_size": 128,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "moe_fp8_dispatch": True,
}


def config_of(layout: Layout, recipe: str, **fields: Any) -> Any:
    from megatron_fp8 import TransformerConfig

    fp8 = {"fp8": "e4m3", "fp8_format": recipe}
    return gpt_config(layout, cls=TransformerConfig, **{**MOE, **fp8, **fields})


# ------------------------------------------------------------------------------------------------- one layer of experts


def layer_case(layout: Layout, recipe: str, fields: dict[str, Any], loud: bool = False) -> dict[str, Any]:
    """A rank case: forward and backward of one layer of experts over this rank's part of a sequence.

    Returns its tokens' results and gradients, the experts' weights' gradients by global number, what was cast (slot,
    rows, direction), what was sent (name, dtype, bytes), and the counts of casts.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer import spec_utils

    from megatron_fp8.mcore.runtime import state_of
    from megatron_fp8.mcore.spec import with_own_modules

    seen: list[tuple[str, int, str]] = []

    class Watching:
        def wants(self, iteration: int) -> bool:
            return True

        def cast(self, cast: Any) -> None:
            if cast.recorded:
                seen.append((cast.slot, len(cast.x), cast.direction))

        def stored(self, *_: Any) -> None: ...
        def product(self, *_: Any) -> None: ...
        def high_precision(self, *_: Any) -> None: ...
        def ended(self, *_: Any) -> None: ...

    with model_parallel(layout):
        config = config_of(layout, recipe, **fields)
        state = state_of(config)  # which experts' copies of the config share
        spec = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=config.moe_grouped_gemm)
        moe = spec_utils.build_module(with_own_modules(spec), config=config, pg_collection=None)
        first = parallel_state.get_expert_model_parallel_rank() * (4 // layout.ep)
        generator = torch.Generator().manual_seed(3)
        values = {
            name: torch.randn(shape, generator=generator) * 0.05
            for name, shape in (
                ("router", (4, HIDDEN)),
                *((f"{e}.fc1", (256, HIDDEN)) for e in range(4)),
                *((f"{e}.fc2", (HIDDEN, 128)) for e in range(4)),
            )
        }
        with torch.no_grad():
            moe.router.weight.copy_(values["router"])
            for e, expert in enumerate(moe.experts.local_experts):
                expert.linear_fc1.weight.copy_(values[f"{first + e}.fc1"])
                expert.linear_fc2.weight.copy_(values[f"{first + e}.fc2"])
        x = torch.randn(SEQUENCE, 1, HIDDEN, generator=generator)
        dy = torch.randn(SEQUENCE, 1, HIDDEN, generator=generator) * 0.01
        if loud:
            x[:, :, ::17] *= 3000
        part = slice(*(i * SEQUENCE // layout.ep for i in (dist.get_rank(), dist.get_rank() + 1)))
        x, dy = x[part].bfloat16().requires_grad_(), dy[part].bfloat16()
        moe.train()
        if dispatch := getattr(moe, "fp8_dispatch", None):
            dispatch.fp8_site  # noqa: B018 sites first, so that all of their casts are seen
        for expert in moe.experts.local_experts:
            expert.linear_fc1.fp8_site, expert.linear_fc2.fp8_site  # noqa: B018
        state.watch(Watching())
        # Megatron-Core has these two by names of its own.
        gather = mock.patch.object(
            mappings, "dist_all_gather_func", lambda *a, **k: dist.all_gather_into_tensor(*a, **k)
        )
        scatter = mock.patch.object(
            mappings, "dist_reduce_scatter_func", lambda *a, **k: dist.reduce_scatter_tensor(*a, **k)
        )
        with gather, scatter, recorded() as log:
            y, _ = moe(x)
            y.backward(dy)
        state.watch(None)
        assert x.grad is not None
        return {
            "y": y.detach(),
            "dx": x.grad,
            "dw": {
                (first + e, name): getattr(expert, name).weight.grad
                for e, expert in enumerate(moe.experts.local_experts)
                for name in ("linear_fc1", "linear_fc2")
            },
            "sent": [(s.name, s.dtype, s.bytes) for s in log.sent],
            "casts": seen,
            "counted": state.counts.casts,
            "notes": sorted(moe.experts.local_experts[0].linear_fc1.fp8_site.notes),
        }
