"""A checkpoint is of the model, not of the layout or the recipe it was saved in."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.support import gpt
from benchmarks.support.fp8_gpt import DEEPSEEK, MOE, NARROW
from benchmarks.support.ranks import Layout, model_parallel
from tests.support.resume import Training, loads_and_saves, tensors_of, trains_and_saves

HISTORY: dict[str, Any] = {**NARROW, "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
SHARDED = {"use_distributed_optimizer": True}
NAME = "iter_0000002"


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())[:6]
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def kinds(tensors: dict[str, torch.Tensor], *, slots: bool) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if (".fp8_state." in name) == slots}


@pytest.fixture(scope="module")
def delayed(ranks, tmp_path_factory) -> tuple[Path, float]:
    """(checkpoint of delayed scaling over TP=2 with sequence parallelism, loss of the next iteration)."""
    folder = tmp_path_factory.mktemp("delayed")
    case = (Layout(tp=2, sp=True), "delayed", HISTORY, {}, str(folder))
    [(loss, _)] = ranks(2).run(trains_and_saves, *case, then=1)[0]
    return folder / NAME, loss


OTHERS: dict[str, tuple[int, Layout, dict[str, Any]]] = {
    "pp2": (2, Layout(pp=2), {}),
    "tp2-sharded": (2, Layout(tp=2), SHARDED),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_layout_loads_every_bit(ranks, tmp_path, delayed, name):
    """Weights, masters, moments and histories are saved again as they were, and training goes on about as it would."""
    source, loss = delayed
    world, layout, ddp = OTHERS[name]
    case = (layout, "delayed", HISTORY, ddp, str(source), str(tmp_path))
    results = ranks(world).run(loads_and_saves, *case, then=1)
    assert_same(tensors_of(source), tensors_of(tmp_path / NAME))
    for notes, [(again, _)] in results:
        assert notes == []
        assert again == pytest.approx(loss, rel=2e-3)


def test_bf16_to_fp8_on_another_layout_and_back(ranks, tmp_path):
    """Weights and optimizer state stay the same bits; delayed weights are warm, other tensors cold."""
    folders = [tmp_path / name for name in ("bf16", "fp8", "weights", "fp4", "back")]
    ranks(1).run(trains_and_saves, Layout(), None, NARROW, {}, str(folders[0]))
    way = [
        (2, Layout(tp=2, sp=True), "delayed", HISTORY, {}),
        (2, Layout(), "delayed", {**HISTORY, "fp8_param": True}, SHARDED),
        (2, Layout(), "nvfp4", NARROW, SHARDED),
        (2, Layout(pp=2), None, NARROW, {}),
    ]
    notes = []
    for (world, *case), source, target in zip(way, folders, folders[1:], strict=False):
        results = ranks(world).run(loads_and_saves, *case, str(source / NAME), str(target))
        notes.append(results[0][0])
    first, fp8, _, _, back = (tensors_of(folder / NAME) for folder in folders)
    assert_same(first, back)
    assert_same(first, kinds(fp8, slots=False))
    assert "scales of 8 weights" in notes[0][0] and "16 tensors" in notes[0][0]
    assert notes[1] == []
    assert notes[2:] == [["the delayed-scaling state of 24 tensors is dropped: this run uses nvfp4"], []]
    for site in ("self_attention.linear_qkv", "mlp.linear_fc2"):
        weight, slot = first[f"decoder.layers.1.{site}.weight"], f"decoder.layers.1.{site}.fp8_state"
        largest = weight.float().abs().max()
        assert fp8[f"{slot}.weight.scale"] == torch.full_like(largest, 448) / largest
        assert fp8[f"{slot}.weight.amax_history"].tolist() == [0, 0, 0, largest]
        assert fp8[f"{slot}.weight.warm"] == 1
        assert fp8[f"{slot}.input.warm"] == 0 and not fp8[f"{slot}.input.amax_history"].any()


def test_another_recipe_or_history(ranks, tmp_path, delayed):
    source, _ = delayed
    results = ranks(1).run(
        loads_and_saves, Layout(), "mxfp8", NARROW, {}, str(source), str(tmp_path / "mxfp8")
    )
    assert results[0][0] == ["the delayed-scaling state of 24 tensors is dropped: this run uses mxfp8"]
    longer = {**HISTORY, "fp8_amax_history_len": 6}
    results = ranks(1).run(
        loads_and_saves, Layout(), "delayed", longer, {}, str(source), str(tmp_path / "six")
    )
    assert results[0][0] == []
    saved, before = tensors_of(tmp_path / "six" / NAME), tensors_of(source)
    histories = [name for name in before if name.endswith(".amax_history")]
    assert len(histories) == 24
    for name in histories:
        assert torch.equal(saved[name][-3:], before[name][-3:]) and not saved[name][:3].any(), name
        assert before[name].any(), name


def test_histories_of_each_data_parallel_rank(ranks, tmp_path):
    """Two ranks' own histories become one of the largest amaxes, with the smaller scale; and that one serves two."""
    own = {**HISTORY, "tp_only_amax_red": True}
    ranks(2).run(trains_and_saves, Layout(), "delayed", own, {}, str(tmp_path / "two"))
    ranks(1).run(
        loads_and_saves, Layout(), "delayed", own, {}, str(tmp_path / "two" / NAME), str(tmp_path / "one")
    )
    ranks(2).run(
        loads_and_saves, Layout(), "delayed", own, {}, str(tmp_path / "one" / NAME), str(tmp_path / "again")
    )
    two, one, again = (kinds(tensors_of(tmp_path / f / NAME), slots=True) for f in ("two", "one", "again"))
    assert any(not torch.equal(*tensor) for name, tensor in two.items() if name.endswith("history"))
    for name, tensor in two.items():
        assert tensor.shape[0] == 2
        joined = tensor.amin(0) if name.endswith("scale") else tensor.amax(0)
        assert torch.equal(one[name][0], joined), name
        assert torch.equal(again[name], joined.expand(2, -1)), name


def test_experts_from_bf16_start_from_their_largest_values(ranks, tmp_path):
    """Each from its own, on whichever rank it was."""
    fields = {**HISTORY, **MOE, "num_layers": 1}
    ranks(1).run(trains_and_saves, Layout(), None, fields, {}, str(tmp_path / "bf16"))
    case = (Layout(ep=2), "delayed", fields, {}, str(tmp_path / "bf16" / NAME), str(tmp_path / "two"))
    notes = ranks(2).run(loads_and_saves, *case)[0][0]
    assert "scales of 6 weights on a rank" in notes[0]
    tensors = tensors_of(tmp_path / "two" / NAME)
    for expert in range(4):
        fc2 = f"decoder.layers.0.mlp.experts.experts.{expert}.linear_fc2"
        scale = tensors[f"{fc2}.fp8_state.weight.scale"]
        largest = tensors[f"{fc2}.weight"].float().abs().max()
        assert scale == torch.full_like(largest, 448) / largest, expert


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_experts_move_between_ranks(ranks, tmp_path, world):
    """From whole experts on each rank to parts of all (on four ranks of some) and back, one at a time and grouped, each
    with its bias."""
    parts: tuple[Layout, dict[str, Any]] = (Layout(tp=2, sp=True), {"moe_grouped_gemm": False})
    if world == 4:
        parts = Layout(tp=2, sp=True, ep=2), {"moe_token_dispatcher_type": "allgather"}
    fields = {**HISTORY, **DEEPSEEK}
    whole = Layout(tp=2, sp=True, ep=2, etp=1)
    ranks(2).run(trains_and_saves, whole, "delayed", fields, SHARDED, str(tmp_path / "0"))
    first = tensors_of(tmp_path / "0" / NAME)
    assert "decoder.layers.0.mlp.experts.experts.3.linear_fc2.fp8_state.weight.scale" in first
    for number, (count, layout, own) in enumerate([(world, *parts), (2, Layout(pp=2), {})]):
        case = (layout, "delayed", {**fields, **own}, SHARDED)
        folders = str(tmp_path / f"{number}" / NAME), str(tmp_path / f"{number + 1}")
        assert ranks(count).run(loads_and_saves, *case, *folders)[0][0] == []
        assert_same(first, tensors_of(tmp_path / f"{number + 1}" / NAME))
    biases = [tensor for name, tensor in first.items() if name.endswith("router.expert_bias")]
    assert len(biases) == 3 and all(bias.dtype == torch.float32 and bias.any() for bias in biases)


def test_megatrons_own_loader_reads_it(ranks, delayed):
    source, _ = delayed
    plain = ranks(1).run(megatron_loads, str(source))[0]
    ours = tensors_of(source)
    assert {name.replace(".fp32_param.", ".param.") for name in plain if not name.startswith("rng.")} == set(
        ours
    )
    for name, tensor in ours.items():
        loaded = plain.get(name, plain.get(name.replace(".param.", ".fp32_param.")))
        assert torch.equal(tensor, torch.from_numpy(loaded).view(tensor.dtype).reshape(tensor.shape)), name


def megatron_loads(folder: str) -> dict[str, Any]:
    """Every tensor, as bytes, as dist_checkpointing.load_plain_tensors gives it."""
    from benchmarks.support.ranks import model_parallel

    with model_parallel():
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load_plain_tensors(folder)
        return {name: tensor.reshape(-1).view(torch.uint8).numpy() for name, tensor in loaded.items()}


OVERLAP = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize("fields", [{}, {"fp8_param": True}], ids=["bf16-weights", "fp8-weights"])
def test_weights_are_stored_as_their_masters_rounded(ranks, tmp_path, fields):
    """With overlapped gathers the live weights of other ranks' shards are one step old; FP8 ones have lost bits."""
    case = (Layout(), "delayed", {**HISTORY, **fields}, OVERLAP, str(tmp_path))
    ranks(2).run(trains_and_saves, *case)
    tensors = tensors_of(tmp_path / NAME)
    weights = {name for name in tensors if not name.startswith("optimizer.") and ".fp8_state." not in name}
    assert len(weights) == 2 * 7 + 3
    for name in weights:
        master = tensors[f"optimizer.state.param.{name}"]
        assert torch.equal(tensors[name], master.bfloat16()), name
        assert tensors[name].dim() == 1 or not torch.equal(master, master.bfloat16().float()), name


def test_fp8_weights_are_cast_with_the_scale_that_they_get(ranks, tmp_path):
    """From BF16 to delayed scaling over TP=2: the scale that the shards share is the one that weights are cast with."""
    ranks(1).run(trains_and_saves, Layout(), None, NARROW, {}, str(tmp_path / "bf16"))
    losses = []
    for fp8_param in (False, True):
        fields = {**HISTORY, "fp8_param": fp8_param}
        case = (
            Layout(tp=2),
            "delayed",
            fields,
            {},
            str(tmp_path / "bf16" / NAME),
            str(tmp_path / f"{fp8_param}"),
        )
        losses.append(ranks(2).run(loads_and_saves, *case, then=1)[0][1])
    assert losses[0] == losses[1] != []


def loads_what_a_gpu_saved(folder: str) -> tuple[Any, bool]:
    """Why streams start anew, and whether the weights are those that were saved with a GPU's streams."""
    from megatron_fp8.files.checkpoint import read_manifest
    from megatron_fp8.mcore import checkpoint
    from megatron_fp8.mcore.checkpoint import training_state as checkpoint_rng

    own = checkpoint_rng.streams

    def of_a_gpu() -> dict[str, torch.Tensor]:
        state = torch.zeros(16, dtype=torch.uint8)
        found = own()
        return {**found, "cuda": state, **{name: state for name in found if name.startswith("tracker.")}}

    with model_parallel(Layout()):
        saved, loaded = (Training(Layout(), "tensorwise", NARROW, {}, seed=seed) for seed in (7, 8))
        saved.steps(1)
        with mock.patch.object(checkpoint_rng, "streams", of_a_gpu):
            path = saved.save(folder)
        resumed = checkpoint.load(path, read_manifest(path), loaded.chunks, loaded.optimizer)
        pairs = zip(saved.chunks[0].parameters(), loaded.chunks[0].parameters(), strict=True)
        return resumed.new_streams, all(torch.equal(one, other) for one, other in pairs)


def test_what_a_gpu_saved_goes_on_on_a_cpu(ranks, tmp_path):
    """On the same layout too, where random streams are of the same places and of another kind."""
    why, same = ranks(1).run(loads_what_a_gpu_saved, str(tmp_path))[0]
    assert why == "a GPU's random streams are not a CPU's" and same


@pytest.mark.parametrize("ddp", [{}, SHARDED], ids=["plain", "sharded"])
def test_a_frozen_fp8_weight_is_stored_as_what_it_stands_for(ranks, tmp_path, ddp):
    """It has no master; a model that loads it computes the same."""
    value, straight, again = ranks(1).run(frozen_saves, str(tmp_path), ddp)[0]
    stored = tensors_of(tmp_path / "iter_0000001")[f"decoder.layers.0.{FROZEN}"]
    assert stored.abs().max() > 0 and torch.equal(stored.float(), torch.from_numpy(value))
    assert straight == again


FROZEN = "mlp.linear_fc2.weight"


def frozen_saves(folder: str, ddp: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(the frozen weight's value, loss and norm of the iteration after a save, those of a model that loaded it)."""
    from megatron_fp8.params.fp8_parameter import Fp8Parameter

    initialise = gpt.initialise

    def frozen(model: Any, config: Any, seed: int) -> None:
        initialise(model, config, seed)
        model.decoder.layers[0].get_parameter(FROZEN).requires_grad_(False)

    with model_parallel(), mock.patch.object(gpt, "initialise", frozen):
        first, second = (
            Training(Layout(), "blockwise", {**NARROW, "fp8_param": True}, ddp, seed) for seed in (1, 2)
        )
        first.steps(1)
        second.load(first.save(folder))
        (weight,) = (p for p in first.chunks[0].parameters() if not p.requires_grad)
        assert isinstance(weight, Fp8Parameter)
        return weight.dequantize().float().numpy(), first.steps(1), second.steps(1)


def test_a_rank_of_a_sharded_optimizer_reads_what_it_will_hold(ranks, tmp_path):
    """No weights, which follow from the masters, and half of the masters and moments."""
    ranks(1).run(trains_and_saves, Layout(), "delayed", HISTORY, {}, str(tmp_path))
    read = ranks(2).run(what_is_read, str(tmp_path / NAME))
    whole = {name: tensor.numel() for name, tensor in tensors_of(tmp_path / NAME).items()}
    kinds = ("optimizer.", "rng.", "decoder.", "embedding.", "output_layer.")
    for found in read:
        assert all(name.startswith(kinds) for name in found)
        weights = [
            name
            for name in found
            if not name.startswith(("optimizer.", "rng.")) and ".fp8_state." not in name
        ]
        assert weights == []
    both = Counter[str]()
    for found in read:
        both.update({name.replace(".fp32_param.", ".param."): count for name, count in found.items()})
    stored = {name: count for name, count in whole.items() if name.startswith("optimizer.")}
    assert {name: both[name] for name in stored} == stored


def what_is_read(folder: str) -> dict[str, int]:
    """By tensor the numbers that a rank of two with a sharded optimizer reads."""
    from torch.distributed.checkpoint import FileSystemReader

    found: dict[str, int] = {}
    read = FileSystemReader.read_data

    def reading(self: Any, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            name = item.dest_index.fqn
            found[name] = found.get(name, 0) + item.lengths.numel()
        return read(self, plan, planner)

    with model_parallel(), mock.patch.object(FileSystemReader, "read_data", reading):
        Training(Layout(), "delayed", HISTORY, SHARDED, seed=3).load(Path(folder))
    return found


def test_weights_are_read_where_the_optimizers_step_makes_them(ranks, tmp_path):
    """Transformer Engine's precision-aware Adam: Megatron-Core copies no master to a weight outside of a step."""
    ranks(1).run(trains_and_saves, Layout(), "tensorwise", NARROW, SHARDED, str(tmp_path))
    stored = tensors_of(tmp_path / NAME)
    for found in ranks(2).run(loads_precision_aware, str(tmp_path / NAME)):
        for name, value in found.items():
            assert torch.equal(torch.from_numpy(value), stored[name].float()), name


def loads_precision_aware(folder: str) -> dict[str, Any]:
    """Weights after a load, by an optimizer that keeps masters in its state."""
    with model_parallel():
        training = Training(Layout(), "tensorwise", NARROW, SHARDED, seed=3)
        for part in training.optimizer.chained_optimizers:
            part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
            part.config.store_param_remainders = False
            inner = part.optimizer
            inner.get_unscaled_state = lambda p, name, inner=inner: inner.state[p][name]
            inner.set_scaled_state = lambda p, name, value, inner=inner: inner.state[p][name].copy_(value)
        training.load(Path(folder))
        names = ("decoder.layers.0.mlp.linear_fc2.weight", "embedding.word_embeddings.weight")
        parameters = {name.removeprefix("module."): p for name, p in training.chunks[0].named_parameters()}
        return {name: parameters[f"module.{name}"].detach().float().numpy() for name in names}


def test_an_optimizer_without_adams_state_is_refused_in_words(ranks):
    assert "SGD cannot be stored in checkpoints of megatron_fp8" in ranks(1).run(sgd_saves)[0]


def sgd_saves() -> str:
    with model_parallel():
        from megatron_fp8.mcore.checkpoint.training_state import sharded_state

        training = Training(Layout(), "tensorwise", NARROW, {}, seed=1)
        optimizer = gpt.build_optimizer(training.config, training.chunks, optim={"optimizer": "sgd"})
        try:
            sharded_state(training.chunks, optimizer)
        except ValueError as error:
            return str(error)
    return "nothing"
