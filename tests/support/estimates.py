"""What a run of a config really holds and sends, counted on ranks; to hold estimates against."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.param_bytes import held, in_gradients, inner_optimizers, size
from benchmarks.support.gpt import _batches, train_step
from benchmarks.support.ranks import Layout, model_parallel
from tests.support.fake_world import counted

TINY = "examples/configs/tiny_gpt_cpu.yaml"
GELU = "examples/configs/tiny_gelu_cpu.yaml"


def options(config: str, **values: Any) -> list[str]:
    """Dotted options over a shipped config, small in layers and tokens; ``values`` have '__' for '.'."""
    small = {"model__hidden_size": 256, "model__ffn_hidden_size": 512, "train__seq_length": 128,
             "train__micro_batch_size": 1, "train__global_batch_size": 4}  # fmt: skip
    named = {key.replace("__", "."): value for key, value in {**small, **values}.items()}
    return [f"--config={config}", *(f"--{key}={_text(value)}" for key, value in named.items())]


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def count_held(arguments: list[str]) -> dict[str, Any]:
    """A rank case: bytes on this rank after an iteration, by kind, what the next one sends in how many calls, and its
    stage."""
    from megatron.core import parallel_state

    from megatron_fp8.train.model import count_parameters

    with _trained(arguments, iterations=1) as (step, chunks, _):
        kept = _held(chunks, step.optimizer)
        with _collectives() as sent, counted() as asked:
            step(1)
        return {
            "stage": parallel_state.get_pipeline_model_parallel_rank(),
            "parameters": count_parameters(chunks)["total"],
            "shapes": _shapes(chunks),
            "sent": dict(sent),
            "calls": {call: one.calls for call, one in asked.items()},
            **kept,
        }


class _Step:
    """Iterations of a run."""

    def __init__(self, config: Any, chunks: list[Any], optimizer: Any, run: Any) -> None:
        self.config, self.chunks, self.optimizer, self.run = config, chunks, optimizer, run

    def __call__(self, iteration: int, fewest: bool = False) -> None:
        """`fewest`: of as few microbatches as the schedule takes, one on each replica if it is not interleaved."""
        from megatron.core import parallel_state

        train, model = self.run.train, self.run.model
        at_once = model.pipeline_model_parallel_size if model.virtual_pipeline_model_parallel_size else 1
        least = train.micro_batch_size * parallel_state.get_data_parallel_world_size() * at_once
        train_step(
            self.config,
            self.chunks,
            self.optimizer,
            iteration,
            micro_batch=train.micro_batch_size,
            global_batch=least if fewest else train.global_batch_size,
            sequence=train.seq_length,
            vocab=model.vocab_size,
        )


@contextmanager
def _trained(arguments: list[str], iterations: int) -> Iterator[tuple[_Step, list[Any], Any]]:
    """A run of these options, built as the app builds it and trained a little: (a step, its chunks, its config)."""
    from megatron_fp8.train.config.model_section import padded_vocab_size, transformer_config
    from megatron_fp8.train.config.run_config import parse
    from megatron_fp8.train.model import build_chunks, build_optimizer

    run = parse(arguments, torch.distributed.get_world_size())
    model = run.model
    layout = Layout(
        tp=model.tensor_model_parallel_size,
        pp=model.pipeline_model_parallel_size,
        vpp=model.virtual_pipeline_model_parallel_size,
        cp=model.context_parallel_size,
        ep=model.expert_model_parallel_size,
        etp=model.expert_tensor_parallel_size,
    )
    with model_parallel(layout):
        config = transformer_config(model)
        chunks = build_chunks(config, run, padded_vocab_size(model, model.vocab_size))
        step = _Step(config, chunks, build_optimizer(config, run, chunks), run)
        for iteration in range(iterations):
            step(iteration, fewest=True)
        yield step, chunks, run


def _shapes(chunks: list[Any]) -> list[list[tuple[str, tuple[int, ...]]]]:
    """(name with a global layer number, shape) of each chunk's parameters, in the module's order."""
    from megatron_fp8.mcore.runtime import unwrap

    found = []
    for chunk in chunks:
        model = unwrap(chunk)
        first = model.decoder.layers[0].layer_number - 1 if len(model.decoder.layers) else 0
        rows = []
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) + first)
            rows.append((".".join(parts), tuple(parameter.shape)))
        found.append(rows)
    return found


def _held(chunks: list[Any], optimizer: Any) -> dict[str, int]:
    from megatron_fp8.mcore.optimizer.adam import Moment
    from megatron_fp8.mcore.runtime import unwrap
    from megatron_fp8.params.fp8_parameter import Fp8Parameter

    weights: list[Any] = []
    kept: list[Any] = []
    for chunk in chunks:
        for parameter in chunk.parameters():
            weights += (
                parameter.stored_tensors() if isinstance(parameter, Fp8Parameter) else [parameter.detach()]
            )
        for module in unwrap(chunk).modules():
            if hasattr(module, "bind_fp8_site") and not isinstance(module.weight, Fp8Parameter):
                kept += held(module)[1:]
    buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    weights += [b.param_data for b in buffers if b.param_data is not None and not in_gradients(b)]
    own = {
        p.untyped_storage().data_ptr()
        for chunk in chunks
        for p in chunk.parameters()
        if not isinstance(p, Fp8Parameter)
    }
    masters: list[Any] = []
    moments: list[Any] = []
    for inner in inner_optimizers(optimizer):
        parameters = [p.detach() for group in inner.param_groups for p in group["params"]]
        masters += [p for p in parameters if p.untyped_storage().data_ptr() not in own]
        for state in inner.state.values():
            for value in state.values():
                if isinstance(value, Moment):
                    moments += value.stored_tensors()
                elif torch.is_tensor(value) and value.ndim:
                    moments.append(value)
    return {
        "weights": size(weights),
        "kept_codes": size(kept),
        "gradients": size([b.grad_data for b in buffers]),
        "masters": size(masters),
        "moments": size(moments),
    }


def largest(counts: list[dict[str, Any]], stage: int) -> Counter[str]:
    """What the fullest rank of a stage holds."""
    names = ("weights", "kept_codes", "gradients", "masters", "moments")
    ranks = [{name: count[name] for name in names} for count in counts if count["stage"] == stage]
    totals = [sum(rank.values()) for rank in ranks]
    return Counter(ranks[totals.index(max(totals))])


# ------------------------------------------------------------------------------------------------------- on the wire


@contextmanager
def _collectives() -> Iterator[Counter[str]]:
    """Collective -> bytes of the whole tensors that it is called with inside, those of up to four elements left out, but
    for tokens to experts."""
    found: Counter[str] = Counter()
    whole = {  # the argument that is the whole tensor
        "all_gather_into_tensor": ("all-gather", 0),
        "reduce_scatter_tensor": ("reduce-scatter", 1),
        "all_reduce": ("all-reduce", 0),
        "all_to_all_single": ("all-to-all", 1),  # what this rank sends; of what comes that is others'
    }
    patches = []
    for name, (kind, position) in whole.items():
        original = getattr(dist, name)

        def call(*args: Any, _k: str = kind, _p: int = position, _f: Any = original, **kwargs: Any) -> Any:
            tensor = args[_p] if len(args) > _p else list(kwargs.values())[_p - len(args)]
            ranks = dist.get_world_size(kwargs.get("group"))
            if ranks > 1 and (tensor.numel() > 4 or _k == "all-to-all"):  # few tokens may go to experts
                found[_k] += tensor.numel() * tensor.element_size()
            return _f(*args, **kwargs)

        patches += _everywhere(original, call)
    from megatron.core.distributed import param_and_grad_buffer as buffers

    gather = buffers.dist_all_gather_func  # this package's own, which knows torch's by another name

    def gathered(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if dist.get_world_size(kwargs["group"]) > 1:
            found["all-gather"] += output.numel() * output.element_size()
        return gather(output, *args, **kwargs)

    patches.append(mock.patch.object(buffers, "dist_all_gather_func", gathered))
    batch = dist.batch_isend_irecv

    def sent(operations: list[Any]) -> Any:
        found["send"] += sum(
            o.tensor.numel() * o.tensor.element_size() for o in operations if o.op is dist.isend
        )
        return batch(operations)

    patches += _everywhere(batch, sent)
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield found


def _everywhere(original: Any, other: Any) -> list[Any]:
    """Patches of every name of torch.distributed and of Megatron-Core that holds a function."""
    return [
        mock.patch.object(module, attribute, other)
        for name, module in list(sys.modules.items())
        if name == "torch.distributed" or name.startswith(("megatron.", "megatron_fp8."))
        for attribute, value in list(vars(module).items())
        if value is original
    ]


# ------------------------------------------------------------------------------------------------ saved for backward


def count_saved(arguments: list[str]) -> int:
    """A rank case: bytes that one microbatch's forward leaves for its backward; neither weights nor their codes."""
    from megatron_fp8.mcore.runtime import unwrap
    from megatron_fp8.mcore.sites import cache_weights
    from megatron_fp8.params.fp8_parameter import Fp8Parameter

    with _trained(arguments, iterations=0) as (_, chunks, run):
        (chunk,) = chunks
        model = unwrap(chunk)
        known: dict[int, Any] = {}  # storages, which may be emptied after they were saved

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            known[storage._cdata] = storage
            return tensor

        batch = next(_batches(0, 1, run.train.micro_batch_size, run.train.seq_length, run.model.vocab_size))
        with cache_weights(chunks), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        others: list[torch.Tensor] = []
        for parameter in model.parameters():
            others += parameter.stored_tensors() if isinstance(parameter, Fp8Parameter) else [parameter]
        for module in model.modules():
            if hasattr(module, "bind_fp8_site") and not isinstance(module.weight, Fp8Parameter):
                others += held(module)[1:]
        for tensor in others:
            known.pop(tensor.untyped_storage()._cdata, None)
        return sum(storage.nbytes() for storage in known.values())
