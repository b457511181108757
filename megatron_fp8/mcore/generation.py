"""Decoding with a KV cache, on Megatron-Core's inference context, without TE.

    decoder = Decoder(model, batch_size=1, max_length=256)
    logits = decoder(prompt)                   # prefill: every token of the prompt at once
    logits = decoder(token)                    # then one at a time

``StaticInferenceContext`` holds keys and values of all layers. Attention writes rotated keys into it, so each key is
rotated once (layers/attention.py). Multi-latent attention stores its latents instead of keys and values
(patches/megatron_fixes.py). The CPU runs it through the engine's patches (``mcore.install()``), with or without FP8.
Megatron-Core's dynamic-batching context needs flash attention and a GPU, and is not used.

How decoding differs from one forward over the whole sequence: attention adds up in another order, in any precision.
FP8 adds no difference where a token's scales do not depend on other tokens (rowwise, blockwise, MXFP8) or are stored
(static, delayed with a history): each linear's result has the same bytes. Tensorwise has one dynamic scale for the
whole tensor, so codes and logits depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ..inference import Sampler
from ..inference.model_size import storage_bytes
from .layers.attention import RotatedKeys
from .runtime import unwrap


class Decoder:
    """A model with the KV cache of the tokens it has processed.

    Args:
        model: a GPTModel on one pipeline stage, without sequence and context parallelism, in Float16Module or not.
            Layers for multi-token prediction do not run.
        batch_size: sequences.
        max_length: capacity of the cache, in tokens per sequence.
        every_token: return the logits of all tokens of a call; False: of the last one.

    Raises:
        ValueError: the model's layout does not allow decoding, or a size is less than 1.
    """

    def __init__(self, model: Any, batch_size: int, max_length: int, *, every_token: bool = False):
        _check_layout(unwrap(model).config)
        if batch_size < 1 or max_length < 1:
            raise ValueError(f"batch_size={batch_size} and max_length={max_length} must be at least 1")
        self.model, self.batch_size, self.max_length = model, batch_size, max_length
        self.context = RotatedKeys(batch_size, max_length)
        self.context.materialize_only_last_token_logits = not every_token

    @property
    def length(self) -> int:
        """Tokens of each sequence in the cache."""
        return self.context.sequence_len_offset

    @property
    def cache_bytes(self) -> int:
        """Memory of this rank's cache at full capacity, in bytes; 0 before the first call."""
        memory = self.context.key_value_memory_dict
        return storage_bytes(tensor for of_layer in memory.values() for tensor in of_layer)

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits [b, 1, V] for tokens int64 [b, n], or [b, n, V] with every_token; equal on all ranks.

        Raises:
            ValueError: wrong batch size, no tokens, or more tokens than the cache has space for.
        """
        batch, count = tokens.shape
        if batch != self.batch_size or not 1 <= count <= self.max_length - self.length:
            raise ValueError(
                f"tokens {list(tokens.shape)}: {self.batch_size} sequences are needed, and from 1 to"
                f" {self.max_length - self.length} tokens (the cache holds {self.max_length}, {self.length} are in it)"
            )
        if self.model.training or unwrap(self.model).training:
            self.model.eval()  # not on every call: it visits all modules, a tenth of a small model's time per token
        positions = torch.arange(
            self.length, self.length + count, device=tokens.device, dtype=torch.int64
        ).expand(batch, -1)
        with _without_multi_token_prediction(unwrap(self.model)):
            logits = self.model(
                tokens, positions, None, inference_context=self.context, runtime_gather_output=True
            )
        self.context.increment_sequence_len_offset(count)
        self.context.enable_decode_mode()
        return logits

    def reset(self) -> None:
        """Empties the cache; its memory stays allocated."""
        self.context.reset()


@contextmanager
def _without_multi_token_prediction(model: Any) -> Iterator[None]:
    """Disables multi-token prediction: GPTModel would run those layers in decoding and ask for labels."""
    before = model.mtp_process, model.config.mtp_num_layers
    model.mtp_process, model.config.mtp_num_layers = False, None
    try:
        yield
    finally:
        model.mtp_process, model.config.mtp_num_layers = before


def _check_layout(config: Any) -> None:
    split = {
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size > 1,
        "context_parallel_size": config.context_parallel_size > 1,
        "sequence_parallel": config.sequence_parallel,
    }
    if wrong := [name for name, on in split.items() if on]:
        raise ValueError(
            f"{', '.join(wrong)}: decoding takes one token at a time, which cannot be split; build the model for"
            " inference with sequence_parallel=False and one pipeline and context parallel rank (tensor parallel"
            " ranks are fine)"
        )


def generate(
    decoder: Decoder,
    prompt: torch.Tensor,
    count: int,
    sampler: Sampler,
    *,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    end: int | Collection[int] | None = None,
) -> Iterator[torch.Tensor]:
    """Yields up to ``count`` tokens, int64 [b] each, after a prompt int64 [b, n]. All ranks call it.

    Args:
        decoder: its cache holds the tokens before the prompt, if there are any.
        generator: for sampling, on the CPU; rank 0's samples are broadcast. One for all sequences, or one for each,
            whose samples then do not depend on the others.
        end: stop ids. Generation stops once every sequence has produced one.

    Raises:
        ValueError: prompt and tokens exceed the decoder's cache, or another number of generators.
    """
    if isinstance(generator, Sequence) and len(generator) != len(prompt):
        raise ValueError(
            f"{len(generator)} generators for {len(prompt)} sequences: give one for each, or one for all"
        )
    room = decoder.max_length - decoder.length
    if prompt.shape[1] + count - 1 > room:
        raise ValueError(
            f"a prompt of {prompt.shape[1]} tokens and {count} more do not fit into the {room} that are left"
        )
    ends = [] if end is None else [end] if isinstance(end, int) else sorted(end)
    last = torch.tensor(ends, dtype=prompt.dtype, device=prompt.device)
    tokens, ended = prompt, torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    for _ in range(count):
        logits = decoder(tokens)[:, -1]
        token = _sample(sampler, logits.cpu(), generator).to(prompt.device)
        if dist.is_initialized() and parallel_state.get_tensor_model_parallel_world_size() > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            dist.broadcast(token, src=dist.get_global_rank(group, 0), group=group)
        yield token
        ended |= torch.isin(token, last)
        if bool(ended.all()):
            return
        tokens = token[:, None]


def _sample(
    sampler: Sampler, logits: torch.Tensor, generator: torch.Generator | Sequence[torch.Generator] | None
) -> torch.Tensor:
    """int64 [b] of logits [b, V]."""
    if not isinstance(generator, Sequence):
        return sampler(logits, generator)
    return torch.cat([sampler(row, own) for row, own in zip(logits.split(1), generator, strict=True)])
