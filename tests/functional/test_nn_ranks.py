"""A converted model on two ranks: DistributedDataParallel and fully_shard, with the bytes that travel."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from megatron_fp8.backends import emulated
from megatron_fp8.nn import (
    Fp8Linear,
    convert_from_fp8,
    convert_to_fp8,
    enable_fp8_all_gather,
    fp8_state_dict,
    fp8_step,
    register_fp8_step,
)
from megatron_fp8.recipe import DelayedScaling

DELAYED = DelayedScaling(amax_history_len=2)


class Net(nn.Module):
    """Two blocks; the rows of the second linear's weight do not divide by two ranks and blocks of 128."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)
        )
        self.lm_head = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.lm_head(x)


def batch(step: int, rank: int) -> torch.Tensor:
    """Ranks see other data, and the larger values are on rank 1."""
    g = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(16, 64, generator=g) * (1 + 3 * rank)


def train(model: nn.Module, params: Any, steps: int = 3, **options: Any) -> list[torch.Tensor]:
    """Losses, of this rank's data."""
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    register_fp8_step(optimizer, model)
    losses = []
    for step in range(steps):
        loss = model(batch(step, dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def by_hand(recipe: Any) -> tuple[list[torch.Tensor], nn.Module]:
    """Data parallelism without a wrapper: gradients averaged one by one."""
    model = convert_to_fp8(Net(), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        loss = model(batch(step, dist.get_rank())).square().mean()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2
        fp8_step(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, model


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(case: Any, wrapped: nn.Module, recipe: Any) -> None:
    """Losses, weights and FP8 state equal those of data parallelism by hand, to the bit."""
    losses, reference = by_hand(recipe)
    mine = train(wrapped, wrapped.parameters())
    assert [x.item() for x in mine] == [x.item() for x in losses], case
    expected = reference.state_dict()
    found = {name.removeprefix("module."): plain(t) for name, t in wrapped.state_dict().items()}
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), f"{case}: {name}"
    state, own = fp8_state_dict(reference), fp8_state_dict(wrapped)
    assert state.keys() == own.keys()
    for name in state:
        unknown = name.endswith("weight.amax") and case[0] == "fsdp"  # no rank has the whole weight
        assert own[name].isinf() if unknown else torch.equal(state[name], own[name]), f"{case}: {name}"


def ddp_case(recipe: Any, converted_first: bool) -> None:
    model = Net()
    wrapped = DistributedDataParallel(convert_to_fp8(model, recipe) if converted_first else model)
    if not converted_first:
        convert_to_fp8(wrapped, recipe)
        assert "module.blocks.0.0" in wrapped.fp8_report.converted
    compare(("ddp", recipe), wrapped, recipe)
    if recipe == DELAYED:
        history = fp8_state_dict(wrapped)["blocks.0.0.input.amax_history"]
        assert history[-1] == max(batch(2, rank).abs().max() for rank in range(2))


@pytest.mark.parametrize("recipe", [DELAYED, "mxfp8"], ids=["delayed", "mxfp8"])
def test_ddp_is_data_parallelism_by_hand_to_the_bit(ranks, recipe):
    ranks(2).run(ddp_case, recipe, recipe == "mxfp8")


def shard(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp_case(recipe: Any, codes: bool) -> None:
    model = convert_to_fp8(Net(), recipe)
    if codes:
        assert len(enable_fp8_all_gather(model)) == 4
    compare(("fsdp", recipe, codes), shard(model), recipe)
    weights = [m.weight for m in model.modules() if isinstance(m, Fp8Linear)]
    assert all(type(w).__name__ == "DTensor" for w in weights)


def padded_scales_case() -> bool:
    """Kernels leave room between the rows of a weight's scales, as the product wants; fully_shard sends flat ones."""

    def with_room(requests: Any) -> Any:
        return [padded(done) for done in quantize_each(requests)]

    def padded(done: Any) -> Any:
        side = done.tensor.rowwise
        if side is None or side.granularity.rows != 128:
            return done
        wide = torch.nn.functional.pad(side.scale_inv, (0, 2))[:, :2]
        return replace(done, tensor=replace(done.tensor, rowwise=replace(side, scale_inv=wide)))

    torch.manual_seed(0)
    model = convert_to_fp8(nn.Sequential(nn.Linear(256, 512)), "blockwise")
    x = torch.randn(16, 256)
    expected = model(x)
    enable_fp8_all_gather(model)
    sharded = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    quantize_each = emulated.quantize_each
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated, "quantize_each", with_room)
        return torch.equal(sharded(x), expected)


def test_scales_of_a_kernel_travel_without_their_padding(ranks):
    assert ranks(2).run(padded_scales_case) == [True, True]


@pytest.mark.parametrize(
    "recipe", ["tensorwise", DELAYED, "blockwise"], ids=["tensorwise", "delayed", "blockwise"]
)
def test_fully_shard_with_fp8_all_gather_is_ddp_to_the_bit(ranks, recipe):
    ranks(2).run(fsdp_case, recipe, True)


@pytest.mark.parametrize("recipe", ["mxfp8"])
def test_fully_shard_with_high_precision_all_gather_is_ddp_to_the_bit(ranks, recipe):
    ranks(2).run(fsdp_case, recipe, False)


# ------------------------------------------------------------------------------------------- what travels, and stays


class Wire(TorchDispatchMode):
    """What this rank sends: (operation, bytes). fully_shard calls torch's collectives by names bound at import."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            names = {argument.name: i for i, argument in enumerate(func._schema.arguments)}
            own = next(names[name] for name in ("input_tensor", "input_tensors", "tensors") if name in names)
            self.sent.append((func._schema.name, sum(t.nbytes for t in tree_leaves(args[own]))))
        return func(*args, **(kwargs or {}))

    def of(self, name: str) -> list[int]:
        """Bytes of every operation with this name."""
        return [size for operation, size in self.sent if name in operation]


def one_step(model: nn.Module) -> tuple[Any, Wire]:
    """Forward, backward and fp8_step, and what they sent."""
    with Wire() as wire:
        model(batch(0, dist.get_rank())).square().mean().backward()
        counts = fp8_step(model)
    return counts, wire


def bytes_case(recipe: Any, policy: MixedPrecisionPolicy, width: int) -> None:
    sent, amax_reductions, gradients = {}, {}, {}
    for codes in (False, True):
        model = convert_to_fp8(Net(), recipe)
        if codes:
            enable_fp8_all_gather(model)
        model = shard(model, mp_policy=policy)
        for _ in range(2):  # the second one meets weights that are known
            model.zero_grad()
            counts, wire = one_step(model)
        sent[codes] = sum(wire.of("allgather"))
        amax_reductions[codes] = len(wire.of("allreduce"))
        assert counts.amax_collectives == 1
        gradients[codes] = [p.grad.full_tensor() for p in model.parameters()]
    values = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, Fp8Linear))
    # Forward gathers all, backward the blocks again; each rank sends its half.
    scales = 2 * 2 * (2 * 1 * 4) // 2 if recipe == "blockwise" else 0
    gathered = values if recipe != "blockwise" else values // 2
    assert sent[False] - sent[True] == 2 * gathered * (width - 1) // 2 - scales
    assert amax_reductions == {False: 1, True: 2 if recipe == "tensorwise" else 1}
    for a, b in zip(gradients[False], gradients[True], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "recipe",
    ["tensorwise", pytest.param(DELAYED, marks=pytest.mark.long), "blockwise"],
    ids=["tensorwise", "delayed", "blockwise"],
)
def test_a_weight_travels_as_one_byte_a_value(ranks, recipe):
    ranks(2).run(bytes_case, recipe, MixedPrecisionPolicy(), 4)


def test_beside_bf16_parameters_and_gradients_in_float32(ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ranks(2).run(bytes_case, "tensorwise", policy, 2)


def freed_case() -> None:
    model = convert_to_fp8(Net(), "tensorwise")
    enable_fp8_all_gather(model)
    shard(model)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = model(batch(0, dist.get_rank())).sum()
    weights = [
        t for t in saved if t.dtype == torch.float8_e4m3fn and set(t.shape) == {64, 256} and 16 not in t.shape
    ]
    assert len(weights) == 3  # the first linear has no dgrad
    assert all(t.untyped_storage().size() == 0 for t in weights)
    loss.backward()
    fp8_step(model)


def test_no_rank_keeps_codes_of_all_weights_between_forward_and_backward(ranks):
    ranks(2).run(freed_case)


def odd_case() -> None:
    """33 rows on two ranks (padding), a weight used twice, a frozen one; state dicts are ordinary."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([nn.Linear(64, 33)])
            self.back, self.tied = nn.Linear(33, 64), nn.Linear(33, 64)
            self.tied.weight = self.back.weight
            self.back.bias.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            return self.back(x) + self.tied(x)

    losses, states = [], []
    for codes in (True, False):
        model = convert_to_fp8(Odd(), DELAYED)
        if codes:
            assert enable_fp8_all_gather(model) == ["blocks.0", "back", "tied"]
            assert model.back.weight is model.tied.weight
        model = shard(model)
        losses.append([x.item() for x in train(model, [p for p in model.parameters() if p.requires_grad])])
        states.append({name: t.full_tensor() for name, t in model.state_dict().items()})
    assert losses[0] == losses[1]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert all(type(t) is torch.Tensor for t in states[0].values())
    again = shard(convert_to_fp8(Odd(), DELAYED))
    again.load_state_dict(model.state_dict(), strict=True)


def test_uneven_shards_tied_and_frozen_weights(ranks):
    ranks(2).run(odd_case)


def refusals_case() -> None:
    from megatron_fp8.nn import fp8_autocast

    for recipe in ("mxfp8", "rowwise"):
        with pytest.raises(ValueError, match="no weight of this model can be gathered as FP8 codes"):
            enable_fp8_all_gather(convert_to_fp8(Net(), recipe))
    model = convert_to_fp8(Net())
    enable_fp8_all_gather(model)
    with pytest.raises(RuntimeError, match="prepared its weight for fully_shard, which has not been called"):
        model(batch(0, 0))
    convert_from_fp8(model)
    assert torch.equal(model(batch(0, 0)), Net()(batch(0, 0)))
    enable_fp8_all_gather(convert_to_fp8(model))
    shard(model)
    with pytest.raises(ValueError, match="sharded already"):
        enable_fp8_all_gather(model)
    with pytest.raises(RuntimeError, match="its weight is a DTensor"):
        model.blocks[0][0](batch(0, 0))
    model(batch(0, 0))
    for region in ({"enabled": False}, {"recipe": "delayed"}):
        with pytest.raises(RuntimeError, match="gathered as FP8 codes"), fp8_autocast(**region):
            model(batch(0, 0))


def test_what_cannot_be_gathered_as_codes_is_refused(ranks):
    ranks(2).run(refusals_case)


def smaller_mesh_case() -> None:
    from torch.distributed.fsdp import FSDPModule

    def as_torch_2_11_has_it(module: Any) -> Any:
        return SimpleNamespace(_fsdp_param_group=state_of(module)._fsdp_param_group)

    state_of = FSDPModule._get_fsdp_state
    for get_state in (state_of, as_torch_2_11_has_it):
        for number, told in (
            (
                2,
                pytest.raises(
                    ValueError, match=r"after_forward=NUMBER\) does not go together with enable_fp8"
                ),
            ),
            (True, nullcontext()),
        ):
            model = convert_to_fp8(Net(), "tensorwise")
            enable_fp8_all_gather(model)
            sharded = shard(model, reshard_after_forward=number)
            with told, mock.patch.object(FSDPModule, "_get_fsdp_state", get_state):
                sharded(batch(0, dist.get_rank()))


def test_fewer_ranks_after_the_forward_are_refused_before_it(ranks):
    ranks(4).run(smaller_mesh_case)


# ------------------------------------------------------------------------------- with torch.compile and checkpointing


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.lm_head(x)


def together_case(kind: str, recipe: Any) -> None:
    torch._dynamo.reset()
    model = convert_to_fp8(Checkpointed() if kind == "checkpointed" else Net(), recipe)
    if kind == "ddp":
        wrapped = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    else:
        if recipe != "mxfp8":
            enable_fp8_all_gather(model)
        wrapped = shard(model)
        if kind == "fsdp":
            wrapped.compile(backend="aot_eager")
    assert [x.item() for x in train(wrapped, wrapped.parameters())] == [x.item() for x in by_hand(recipe)[0]]
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("ddp", DELAYED),
        pytest.param("fsdp", "mxfp8", marks=pytest.mark.long),
        ("fsdp", "tensorwise"),
        ("checkpointed", DELAYED),
    ],
    ids=["ddp", "fsdp", "fsdp of codes", "checkpointed fsdp of codes"],
)
def test_compiled_and_checkpointed_models_keep_the_bits(ranks, kind, recipe):
    ranks(2).run(together_case, kind, recipe)
