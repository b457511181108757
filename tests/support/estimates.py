"""What a run of a config really holds and sends, counted on ranks; to hold estimates against."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from benchmarks.param_bytes import held, in_gradients, inner_optimizers, size
from benchmarks.support.gpt import train_step
from benchmarks.support.ranks import Layout, model_parallel

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
    """A rank case: bytes on this rank after two iterations, by kind, and its pipeline stage."""
    from megatron.core import parallel_state

    from megatron_fp8.train.config.model_section import padded_vocab_size, transformer_config
    from megatron_fp8.train.config.run_config import parse
    from megatron_fp8.train.model import build_chunks, build_optimizer, count_parameters

    run = parse(arguments)
    model, train = run.model, run.train
    layout = Layout(
        tp=model.tensor_model_parallel_size,
        pp=model.pipeline_model_parallel_size,
        vpp=model.virtual_pipeline_model_parallel_size,
        cp=model.context_parallel_size,
        ep=model.expert_model_parallel_size,
        etp=model.expert_tensor_parallel_size,
    )
    with model_parallel(layout):
        vocab = padded_vocab_size(model, model.vocab_size)
        config = transformer_config(model)
        chunks = build_chunks(config, run, vocab)
        optimizer = build_optimizer(config, run, chunks)
        step = {
            "micro_batch": train.micro_batch_size,
            "global_batch": train.global_batch_size,
            "sequence": train.seq_length,
            "vocab": model.vocab_size,
        }
        for iteration in range(2):
            train_step(config, chunks, optimizer, iteration, **step)
        return {
            "stage": parallel_state.get_pipeline_model_parallel_rank(),
            "parameters": count_parameters(chunks)["total"],
            "shapes": _shapes(chunks),
            **_held(chunks, optimizer),
        }


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
    from megatron_fp8.mcore.optimizer.compact_moments import Moment
    from megatron_fp8.mcore.runtime import unwrap
    from megatron_fp8.params.fp8_parameter import Fp8Parameter

    weights, kept = [], []
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
    masters, moments = [], []
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
    return Counter(max(ranks, key=lambda rank: sum(rank.values())))
