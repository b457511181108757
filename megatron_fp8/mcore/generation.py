"""Decoding with a KV cache, on Megatron-Core's inference context, without TE.

    decoder = Decoder(model, batch_size=1, max_length=256)
    logits = decoder(prompt)                   # prefill: every token of the prompt at once
    logits = decoder(token)                    # then one at a time

``StaticInferenceContext`` holds keys and values of all layers; attention writes into it and reads from it, keys rotated
once (layers/rotary.py). Of multi-latent attention it holds the latents that keys and values are made of
(layers/latent.py). It runs on the CPU through the engine's patches (``mcore.install()``), FP8 or not.
Megatron-Core's other context, for batches that change, needs flash attention and a GPU, and is not used.

How decoding differs from one forward over the whole sequence: attention sums the same numbers in another order, in any
precision. FP8 adds nothing to that where a token's scales are its own (rowwise, blockwise, MXFP8) or known before
(static, delayed with a history): each linear gives the same bytes for a token alone as among others. With one dynamic
scale for the whole tensor (tensorwise) a token's codes depend on the tokens it came with, and the logits differ as
those of two batches do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ..inference import Sampler
from ..inference.memory import storage_bytes
from .layers.rotary import RotatedKeys
from .runtime import unwrap


class Decoder:
    """A model and the keys and values of the tokens it has seen.

    Args:
        model: a GPTModel on one pipeline stage, without sequence and context parallelism, in Float16Module or not.
            Its layers of multi-token prediction, if it has any, do not run.
        batch_size: sequences.
        max_length: tokens of each that the cache holds.
        every_token: logits of all tokens that are given; False: of the last one.

    Raises:
        ValueError: the model is split in a way that one token cannot be, or a size is less than 1.
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
        """Tokens of each sequence seen so far."""
        return self.context.sequence_len_offset

    @property
    def cache_bytes(self) -> int:
        """Memory of this rank's cache, for all tokens that it has room for; 0 before the first call."""
        memory = self.context.key_value_memory_dict
        return storage_bytes(tensor for of_layer in memory.values() for tensor in of_layer)

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [b, 1, V] after tokens int64 [b, n], or [b, n, V] with every_token; the same on all ranks.

        Raises:
            ValueError: another batch size, no tokens, or more than the cache has room for.
        """
        batch, count = tokens.shape
        if batch != self.batch_size or not 1 <= count <= self.max_length - self.length:
            raise ValueError(
                f"tokens {list(tokens.shape)}: {self.batch_size} sequences are needed, and from 1 to"
                f" {self.max_length - self.length} tokens (the cache holds {self.max_length}, {self.length} are in it)"
            )
        if self.model.training or unwrap(self.model).training:
            self.model.eval()  # it goes through all modules, which takes a tenth of a token of a small model
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
        """Forget every token; the memory stays."""
        self.context.reset()


@contextmanager
def _without_multi_token_prediction(model: Any) -> Iterator[None]:
    """Megatron-Core's GPTModel runs those layers on whatever it is given, and then wants labels for them."""
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
    generator: torch.Generator | None = None,
    end: int | Collection[int] | None = None,
) -> Iterator[torch.Tensor]:
    """Yield up to ``count`` tokens, int64 [b] each, that follow a prompt int64 [b, n]. On every rank.

    Args:
        decoder: one that has seen what comes before the prompt, or nothing.
        generator: of the random draws, on the CPU; rank 0's draws count.
        end: stop after a step in which every sequence has had this id, or one of these.

    Raises:
        ValueError: prompt and tokens do not fit into the decoder's cache.
    """
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
        token = sampler(logits.cpu(), generator).to(prompt.device)
        if dist.is_initialized() and parallel_state.get_tensor_model_parallel_world_size() > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            dist.broadcast(token, src=dist.get_global_rank(group, 0), group=group)
        yield token
        ended |= torch.isin(token, last)
        if bool(ended.all()):
            return
        tokens = token[:, None]
