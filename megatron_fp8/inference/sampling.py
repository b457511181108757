"""Samples the next token from logits: greedy, or with temperature, top-k and top-p."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampler:
    """Sampling parameters.

    Args:
        temperature: 0 takes the most likely token (the first of equals); otherwise logits are divided by it.
        top_k: only the k most likely tokens; 0: all.
        top_p: only the smallest set of most likely tokens whose probabilities sum to at least p (Holtzman et
            al., arXiv 1904.09751); 1: all. Applied after top_k.
        vocab_size: ids from this value on are padding and are never drawn; None: all ids are tokens.

    Raises:
        ValueError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature {self.temperature!r}: a finite number from 0 (greedy) is needed")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k!r}: a whole number from 0 (all tokens) is needed")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p!r}: a number above 0 and up to 1 (all tokens) is needed")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"vocab_size {self.vocab_size!r}: at least one token is needed")

    def __call__(self, logits: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """int64 [b], one token per row of logits [b, V].

        Raises:
            ValueError: a row has NaN or +Inf, so the model or its checkpoint is broken.
        """
        logits = logits[:, : self.vocab_size].float()
        if not bool((logits < math.inf).all()):
            raise ValueError("logits hold NaN or Inf: the weights or a static scale are broken")
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator).squeeze(1)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 [b, V], the distribution to draw from; rows sum to 1."""
        # Subtracting the largest logit first avoids overflow at small temperatures.
        logits = (logits.float() - logits.float().amax(-1, keepdim=True)) / max(self.temperature, 1e-30)
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        probabilities = logits.softmax(-1)
        if self.top_p == 1:
            return probabilities
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        in_nucleus = ordered.masked_fill(before >= self.top_p, 0.0)
        in_nucleus[:, 0] = ordered[:, 0]
        return torch.zeros_like(in_nucleus).scatter_(-1, order, in_nucleus / in_nucleus.sum(-1, keepdim=True))
