"""Small modules of experts of transformers, and the same experts as linears that are called one after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GptOssConfig, Llama4TextConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

EXPERTS, HIDDEN, WIDTH, CHOICES = 4, 48, 80, 2
SIZES = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_local_experts": EXPERTS}


class Layer(nn.Module):
    """Experts in a model, as `experts`, behind a projection of their input."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        self.experts = experts

    def forward(self, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        return self.experts(self.proj(x), *routing)


def layer(kind: str = "mixtral", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Layer:
    """'mixtral': [out, in], no biases; 'gpt_oss': [in, out], biases, a gate of its own; 'llama4'."""
    torch.manual_seed(seed)
    config: Any
    experts: nn.Module
    if kind == "llama4":
        experts = Llama4TextExperts(Llama4TextConfig(**SIZES))
    else:
        config = MixtralConfig(**SIZES) if kind == "mixtral" else GptOssConfig(**SIZES)
        config._experts_implementation = "grouped_mm"
        experts = MixtralExperts(config) if kind == "mixtral" else GptOssExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    return Layer(experts).to(dtype)


class Linears(nn.Module):
    """The same experts as nn.Linears: `gate_up.3` and `down.3`."""

    def __init__(self, experts: Any):
        super().__init__()
        self.experts = experts  # for its gate and biases; its stacks are not used
        self.gate_up, self.down = (
            nn.ModuleList(_linear(matrix, transposed(experts)) for matrix in stack.detach())
            for stack in (experts.gate_up_proj, experts.down_proj)
        )

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        made: Any = None
        for e in range(EXPERTS):
            token, choice = torch.where(chosen == e)
            up = self.gate_up[e](x[token]) + self._bias("gate_up", e)
            down = self.down[e](self.experts._apply_gate(up)) + self._bias("down", e)
            made = down.new_zeros(*chosen.shape, HIDDEN) if made is None else made
            made = made.index_put((token, choice), down)
        return (made * counts.unsqueeze(-1)).sum(1).to(x.dtype)

    def _bias(self, of: str, e: int) -> Any:
        found = getattr(self.experts, f"{of}_proj_bias", None)
        return 0 if found is None else found[e]

    def gradient(self, of: str) -> torch.Tensor:
        """What the stack's gradient would be."""
        found = torch.stack([linear.weight.grad for linear in getattr(self, of)])
        return found.transpose(1, 2) if transposed(self.experts) else found


def transposed(experts: Any) -> bool:
    return bool(getattr(experts, "is_transposed", True))


def _linear(matrix: torch.Tensor, is_transposed: bool) -> nn.Linear:
    weight = matrix.t() if is_transposed else matrix
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight.data.copy_(weight)
    return linear


def routing(
    tokens: int = 37, *, without: int | None = None, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts and what they count, [tokens, choices] each; one expert gets none."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, EXPERTS, generator=draw)
    if without is not None:
        scores[:, without] = float("-inf")
    counts, chosen = scores.softmax(-1).topk(CHOICES)
    return chosen, counts


def hidden(tokens: int = 37, dtype: torch.dtype = torch.bfloat16, seed: int = 2) -> torch.Tensor:
    return (
        torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()
    )
