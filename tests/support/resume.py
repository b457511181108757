"""Rank cases that train the small GPT of benchmarks/support/gpt.py, save, and go on from it in a model built anew."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.fp8_gpt import OPTIONS, fp8_config
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, model_parallel


class Training:
    """A model, its optimizer, and the iterations that it has done."""

    def __init__(
        self, layout: Layout, recipe: str | None, fields: dict, ddp: dict, seed: int, **options: Any
    ):
        from megatron_fp8.mcore.optimizer.adam import compact_state
        from megatron_fp8.mcore.params import gather_settings
        from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

        self.config = fp8_config(layout, recipe, **fields)
        shared: dict[str, Any] = {}
        if fields.get("fp8_param"):
            shared = gather_settings(self.config, distributed=ddp.get("use_distributed_optimizer", False))
        share = shared.get("reuse_grad_buf_for_mxfp8_param_ag", False)
        self.options = {"sequence": OPTIONS["sequence"], **options}
        self.chunks = build_chunks(
            self.config,
            spec=get_gpt_layer_fp8_spec,
            ddp={**ddp, **shared},
            seed=seed,
            sequence=self.options["sequence"],
            tied=self.options.pop("tied", False),
        )
        with compact_state() if self.options.pop("compact", False) else nullcontext():
            self.optimizer = build_optimizer(
                self.config,
                self.chunks,
                ddp=ddp,
                optim={"reuse_grad_buf_for_mxfp8_param_ag": share, **self.options.pop("optim", {})},
            )
        self.iteration = 0

    def steps(self, count: int) -> list[tuple[float, float]]:
        """(loss, gradient norm) of the next iterations."""
        found = []
        for _ in range(count):
            found.append(
                train_step(
                    self.config, self.chunks, self.optimizer, self.iteration, **{**OPTIONS, **self.options}
                )
            )
            self.iteration += 1
        return found

    def save(self, folder: str, **options: Any) -> Path:
        """Save; the checkpoint's folder."""
        from megatron_fp8.files.checkpoint import Manifest, folder_name
        from megatron_fp8.mcore import checkpoint
        from megatron_fp8.mcore.checkpoint.saver import Saver
        from megatron_fp8.mcore.replica_check import describe_differences

        assert describe_differences(self.chunks, self.optimizer) == ""
        saver = Saver(Path(folder), **options)
        state = checkpoint.numbers(self.chunks, self.optimizer)
        manifest = Manifest(self.iteration, state, checkpoint.layout_facts(self.chunks))
        saver.save(checkpoint.sharded_state(self.chunks, self.optimizer), manifest)
        self.saver = saver
        if not options.get("asynchronous"):
            saver.close()
        return Path(folder) / folder_name(self.iteration)

    def load(self, folder: Path) -> list[str]:
        """Load; the notes."""
        from megatron_fp8.files.checkpoint import read_manifest
        from megatron_fp8.mcore import checkpoint

        manifest = read_manifest(folder)
        resumed = checkpoint.load(folder, manifest, self.chunks, self.optimizer)
        self.iteration = manifest.iteration
        return resumed.notes

    def digests(self) -> dict[str, str]:
        """Of every byte that training continues from, by kind: equal digests, equal state."""
        from megatron_fp8.mcore.checkpoint.training_state import streams
        from megatron_fp8.mcore.runtime import state_of
        from megatron_fp8.params.fp8_parameter import Fp8Parameter

        if self.chunks[0].ddp_config.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        weights = {name: p for chunk in self.chunks for name, p in chunk.named_parameters()}
        buffers = {name: b for chunk in self.chunks for name, b in chunk.named_buffers()}
        weights |= {name: b for name, b in buffers.items() if name.endswith("expert_bias")}
        for name, parameter in list(weights.items()):
            if isinstance(parameter, Fp8Parameter):
                for way in ("rowwise", "columnwise"):
                    side = getattr(parameter.quantized, way)
                    weights |= {f"{name}.{way}": side.codes, f"{name}.{way}.scales": side.scale_inv}
        moments: dict[str, torch.Tensor] = {}
        each = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        for number, optimizer in enumerate(each):
            for group in optimizer.param_groups:
                for index, parameter in enumerate(group["params"]):
                    start = f"{number}.{group['wd_mult']}.{group['is_expert_parallel']}.{index}"
                    moments[f"{start}.master"] = parameter
                    for name, value in optimizer.optimizer.state.get(parameter, {}).items():
                        moments[f"{start}.{name}"] = value
                moments[f"{number}.step"] = torch.tensor(group.get("step", -1))
        state = state_of(self.config)
        fp8 = {
            f"{slot.name}.{part}": value
            for slot in state.slots()
            if slot.delayed is not None
            for part, value in slot.arena.saved_slot(slot).items()
        }
        fp8["iteration"] = torch.tensor(state.iteration)
        kinds = {"weights": weights, "optimizer": moments, "fp8": fp8, "rng": streams()}
        return {kind: _digest(tensors) for kind, tensors in kinds.items()}


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        hasher.update(name.encode())
        hasher.update(plain.view(torch.uint8).numpy())
    return hasher.hexdigest()


def resumes_exactly(
    layout: Layout,
    recipe: str | None,
    fields: dict[str, Any],
    ddp: dict[str, Any],
    folder: str,
    asynchronous: bool = False,
    back: bool = False,
    **options: Any,
) -> dict[str, dict[str, tuple[Any, Any]]]:
    """A rank case: what differs between four iterations and

    'anew': two, a checkpoint, a new model and two more;
    'back', if asked for: the four, one on other data and a return to that checkpoint in the same model, like a rewind;

    {}: nothing. Where nothing is remembered or gathered over iterations it is one instead of each two.
    """
    differences = {}
    count = 2 if recipe == "delayed" or ddp.get("overlap_param_gather") else 1
    with model_parallel(layout):
        whole = Training(layout, recipe, fields, ddp, seed=7, **{**_short(layout, 2), **options})
        whole.steps(count)
        checkpoint = whole.save(folder, asynchronous=asynchronous)
        at_save = whole.digests()
        losses = whole.steps(count)
        whole.saver.close()
        wanted = {"notes": [], **{f"{kind} at load": value for kind, value in at_save.items()}}
        wanted.update({"losses": losses, **whole.digests()})
        if back:
            whole.iteration = 100
            whole.steps(1)
            assert whole.digests()["weights"] != wanted["weights"] != at_save["weights"]
            differences["back"] = _differences_from(checkpoint, whole, wanted, count)
    with model_parallel(layout, seed=99):
        again = Training(layout, recipe, fields, ddp, seed=8, **{**_short(layout, 2), **options})
        assert again.digests()["weights"] != at_save["weights"]
        differences["anew"] = _differences_from(checkpoint, again, wanted, count)
    return differences


def _differences_from(
    checkpoint: Path, training: Training, wanted: dict[str, Any], count: int
) -> dict[str, tuple[Any, Any]]:
    """(wanted, found) where loading a checkpoint and some iterations give something else."""
    found: dict[str, Any] = {"notes": training.load(checkpoint)}
    found |= {f"{kind} at load": value for kind, value in training.digests().items()}
    found.update({"losses": training.steps(count), **training.digests()})
    return {name: (wanted[name], found[name]) for name in wanted if wanted[name] != found[name]}


def _short(layout: Layout, batch: int) -> dict[str, int]:
    """Options of an iteration of few tokens: the same batch in every layout, in one microbatch, or in one a stage where
    chunks are interleaved."""
    from megatron.core import parallel_state

    count = parallel_state.get_data_parallel_world_size() * (layout.pp if layout.vpp else 1)
    return {"sequence": 64, "micro_batch": batch // count, "global_batch": batch}


def trains_and_saves(
    layout: Layout,
    recipe: str | None,
    fields: dict[str, Any],
    ddp: dict[str, Any],
    folder: str,
    then: int = 0,
) -> list[tuple[float, float]]:
    """A rank case: two iterations, a checkpoint, and what the ``then`` next ones are."""
    with model_parallel(layout):
        training = Training(layout, recipe, fields, ddp, seed=7, **_short(layout, 4))
        training.steps(2)
        training.save(folder)
        return training.steps(then)


def loads_and_saves(
    layout: Layout,
    recipe: str | None,
    fields: dict[str, Any],
    ddp: dict[str, Any],
    source: str,
    target: str,
    then: int = 0,
) -> tuple[list[str], list[tuple[float, float]]]:
    """A rank case: loads into another model, saves that as it is; (notes, what the ``then`` next iterations are)."""
    with model_parallel(layout, seed=99):
        training = Training(layout, recipe, fields, ddp, seed=8, **_short(layout, 4))
        notes = training.load(Path(source))
        training.save(target)
        return notes, training.steps(then)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, but the random streams; master weights under one name."""
    from megatron_fp8.files.checkpoint import read_metadata, read_tensor

    metadata = read_metadata(folder)
    return {
        name.replace(".fp32_param.", ".param."): read_tensor(folder, metadata, name)
        for name in metadata.state_dict_metadata
        if not name.startswith("rng.")
    }
