"""Expert modules known to convert_to_fp8: stacked matrices, and a forward with routing.

An expert module has no linears to convert. The table ``KINDS`` lists the supported implementations. Each
entry names the stacked parameters and reimplements the forward with ``Fp8Experts.multiplied`` for every
product. The forward of any other class is unknown, so such a module stays in high precision, and the report
says so.

    transformers' experts   every class under its ``use_experts_implementation``: Mixtral, Qwen2-MoE to
        Qwen3-Next,
                            DeepSeek-V2 and V3, GPT-OSS, OLMoE, GLM-4-MoE, ... The config selects the forward;
                            the classes declare their weight layout, and all compute the same function
    Llama 4's               its own forward: each expert receives all tokens, and zero router scores mask them

Rejected: an entry in transformers' own table of forwards. The config selects one forward for all layers, so a
change of the config would silently disable FP8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from .experts import Fp8Experts


class Stack(NamedTuple):
    """One parameter [experts, out, in]: one linear of every expert.

    Attributes:
        parameter: its name.
        label: the site's label, part of its name: 'gate_up' in 'mlp.experts.3.gate_up'.
        transposed: the matrices are [in, out].
        bias: name of the bias parameter [experts, out]; None if there is none.
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
    """One implementation of expert modules.

    Attributes:
        has: whether a class belongs to it.
        stacks: the stacked parameters of a module.
        forward: the forward; takes the converted module and the call's arguments.
    """

    has: Callable[[type[torch.nn.Module]], bool]
    stacks: Callable[[Any], tuple[Stack, ...]]
    forward: Callable[..., torch.Tensor]


def kind_of(module_class: type[torch.nn.Module]) -> Kind | None:
    """The implementation that a class belongs to; None if unsupported."""
    return next((kind for kind in KINDS if kind.has(module_class)), None)


# ----------------------------------------------------------------------------------------------- transformers' interface


def _is_decorated(module_class: type[torch.nn.Module]) -> bool:
    """Whether the forward is the decorator's. A subclass with its own forward may compute something else."""
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


def _transformers_forward(
    experts: Fp8Experts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """[tokens, H] from hidden states [tokens, H], expert numbers [tokens, k] and router weights [tokens, k].

    The sum over k has the same order as in transformers' grouped forward.
    """
    module: Any = experts
    up, down = experts.fp8_stacks
    experts_of_tokens = top_k_index.reshape(-1)
    order = experts_of_tokens.argsort(stable=True)  # [tokens * k], by expert, stable
    tokens, row_experts = _counts(experts, experts_of_tokens), experts_of_tokens[order]
    x = hidden_states[order // top_k_index.shape[-1]]
    x = experts.multiplied(up, x, tokens, row_experts)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = experts.multiplied(down, x, tokens, row_experts)
    if module.has_post_expert_norm:
        x = module.post_expert_norm(x)
    weighted = x * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), dtype=order.dtype, device=order.device)
    summed: torch.Tensor = weighted[back].unflatten(0, top_k_index.shape).sum(1)
    return summed.to(hidden_states.dtype)


def _counts(experts: Fp8Experts, chosen: torch.Tensor) -> torch.Tensor:
    """Tokens per expert, int64 [experts] on the CPU. This is the only synchronisation with the host.

    Rejected: torch.bincount, which synchronises twice more, for the minimum and the maximum.
    """
    count = experts.fp8_count
    places = chosen.clamp(-1, count).remainder(count + 1)  # the last bin counts invalid expert numbers
    found = torch.zeros(count + 1, dtype=torch.int64, device=chosen.device)
    counts = found.scatter_add(0, places.long(), torch.ones_like(places, dtype=torch.int64)).cpu()
    # In a graph the operators detect leftover rows.
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


def _llama4_forward(experts: Fp8Experts, hidden_states: torch.Tensor) -> torch.Tensor:
    """[experts * tokens, H] from an input of that shape: each expert's tokens in turn, the same number for every
    expert."""
    module: Any = experts
    up, down = experts.fp8_stacks
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    count = experts.fp8_count
    tokens = torch.full((count,), x.shape[0] // count, dtype=torch.int64, device="cpu")
    gate, x = experts.multiplied(up, x, tokens).chunk(2, dim=-1)
    return experts.multiplied(down, x * module.act_fn(gate), tokens)


KINDS = (
    Kind(_is_decorated, _stacks_of_decorated, _transformers_forward),
    Kind(_is_llama4, _stacks_of_llama4, _llama4_forward),
)
