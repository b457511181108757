"""Expert modules known to convert_to_fp8: stacked matrices, and a forward with routing.

Such a module has no linear to convert. What can be converted is known by its class, one entry of ``KINDS`` for each
way of computing: which parameters are the stacks, and the forward again, with each product of a stack left to
``Fp8Experts.multiplied``. A module of no kind stays as it is, and the report says so: its forward could be anything.

    transformers' experts   every class under its ``use_experts_implementation``: Mixtral, Qwen2-MoE to Qwen3-Next,
                            DeepSeek-V2 and V3, GPT-OSS, OLMoE, GLM-4-MoE, ... The decorator lets a config choose the
                            forward, so the classes say how their weights lie and all compute alike
    Llama 4's               its own: every expert is given every token, and the router's zeros do the rest

Rejected: an entry in transformers' own table of such forwards. A config chooses there, for all layers at once, and who
changes it would switch FP8 off without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from .experts import Fp8Experts


class Stack(NamedTuple):
    """One parameter [experts, out, in], a linear of each expert.

    Attributes:
        parameter: its name.
        label: what a site is called by, and a part of its name: 'gate_up' in 'mlp.experts.3.gate_up'.
        transposed: its matrices are [in, out].
        bias: the name of the biases [experts, out], if there are any.
    """

    parameter: str
    label: str
    transposed: bool = False
    bias: str | None = None

    def features(self, module: torch.nn.Module) -> tuple[int, int]:
        """(out features, in features) of each expert's linear."""
        _, rows, cols = getattr(module, self.parameter).shape
        return (cols, rows) if self.transposed else (rows, cols)


class Kind(NamedTuple):
    """One way in which modules of experts compute.

    Attributes:
        has: whether a class is of it.
        stacks: those of a module.
        forward: the module's forward, given the converted module and the arguments of the call.
    """

    has: Callable[[type[torch.nn.Module]], bool]
    stacks: Callable[[Any], tuple[Stack, ...]]
    forward: Callable[..., torch.Tensor]


def kind_of(module_class: type[torch.nn.Module]) -> Kind | None:
    """The kind that a class is of, None of others."""
    return next((kind for kind in KINDS if kind.has(module_class)), None)


# ----------------------------------------------------------------------------------------------- transformers' interface


def _is_decorated(module_class: type[torch.nn.Module]) -> bool:
    """Whether the forward is the decorator's; a subclass with another one computes something of its own."""
    code = getattr(module_class.forward, "__code__", None)
    return (
        code is not None and "experts_interface" in code.co_freevars and hasattr(module_class, "_apply_gate")
    )


def _stacks_of_decorated(module: Any) -> tuple[Stack, ...]:
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return tuple(
        Stack(
            name,
            name.removesuffix("_proj"),
            module.is_transposed,
            f"{name}_bias" if module.has_bias else None,
        )
        for name in names
    )


def _routed(
    experts: Fp8Experts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """[tokens, H] of hidden states [tokens, H], of each token's experts [tokens, k] and of what their results count.

    The sum over k is the one that transformers' grouped forward makes: in order, whatever the experts.
    """
    module: Any = experts
    up, down = experts.fp8_stacks
    chosen = top_k_index.reshape(-1)
    order = chosen.argsort(stable=True)  # [tokens * k], expert by expert, an expert's tokens as they came
    tokens, of_rows = _counts(experts, chosen), chosen[order]
    x = hidden_states[order // top_k_index.shape[-1]]
    x = experts.multiplied(up, x, tokens, of_rows)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = experts.multiplied(down, x, tokens, of_rows)
    if module.has_post_expert_norm:
        x = module.post_expert_norm(x)
    weighted = x * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), dtype=order.dtype, device=order.device)
    summed: torch.Tensor = weighted[back].unflatten(0, top_k_index.shape).sum(1)
    return summed.to(hidden_states.dtype)


def _counts(experts: Fp8Experts, chosen: torch.Tensor) -> torch.Tensor:
    """How many tokens each expert gets, int64 [experts] on the CPU: the one thing that the host waits for.

    torch.bincount would let it wait twice more, for the smallest and the largest number.
    """
    count = experts.fp8_count
    places = chosen.clamp(-1, count).remainder(count + 1)  # the last one is of numbers that no expert has
    found = torch.zeros(count + 1, dtype=torch.int64, device=chosen.device)
    counts = found.scatter_add(0, places.long(), torch.ones_like(places, dtype=torch.int64)).cpu()
    # In a graph the operators find that rows are left over.
    if not torch.compiler.is_compiling() and counts[-1]:
        wrong = chosen[places == count][0].item()
        raise ValueError(
            f"{experts.fp8_name}: a token is sent to expert {wrong}, and there are {count}: experts that transformers"
            " distributes over ranks run in FP8 under megatron_fp8.mcore"
        )
    return counts[:-1]


# ------------------------------------------------------------------------------------------------------------- Llama 4's


def _is_llama4(module_class: type[torch.nn.Module]) -> bool:
    return (module_class.__module__, module_class.__name__) == (
        "transformers.models.llama4.modeling_llama4",
        "Llama4TextExperts",
    )


def _stacks_of_llama4(module: Any) -> tuple[Stack, ...]:
    return Stack("gate_up_proj", "gate_up", True), Stack("down_proj", "down", True)


def _all_tokens_each(experts: Fp8Experts, hidden_states: torch.Tensor) -> torch.Tensor:
    """[experts * tokens, H] of as many: every expert's tokens one after the other, the same number each."""
    module: Any = experts
    up, down = experts.fp8_stacks
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    count = experts.fp8_count
    tokens = torch.full((count,), x.shape[0] // count, dtype=torch.int64, device="cpu")
    gate, x = experts.multiplied(up, x, tokens).chunk(2, dim=-1)
    return experts.multiplied(down, x * module.act_fn(gate), tokens)


KINDS = (
    Kind(_is_decorated, _stacks_of_decorated, _routed),
    Kind(_is_llama4, _stacks_of_llama4, _all_tokens_each),
)
