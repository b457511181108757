"""Megatron-Core's experts with the products of all of this rank's experts in one call (``moe_grouped_gemm=True``).

Megatron-Core's own GroupedMLP needs the grouped_gemm package and multiplies in BF16; its TEGroupedMLP needs
Transformer Engine. This class is Megatron-Core's SequentialMLP with another forward. The experts are the same MLPs
with the same linears, so parameters, initialisation, sites, histories, FP8 parameters and checkpoints have the same
names as with ``moe_grouped_gemm=False``, and a run may switch between the two. Megatron-Core's checkpoints name the
tensors of sequential and grouped experts alike, so those of its GroupedMLP can be loaded too.

Between the two grouped linears Megatron-Core's MLP.forward itself runs, once for all tokens: SwiGLU, or any other
activation, with the router's probabilities; or the casts of each expert's rows compute it (activation.py). Tokens are not
padded: casts have the boundaries of the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch.nn.modules.module import _has_any_global_hook

from ...linear.function import Tokens, group_where_possible, grouped_linear, on_host
from .activation import computes_activation
from .linear import Fp8ColumnParallelLinear, Fp8RowParallelLinear


class Fp8GroupedMLP(SequentialMLP):
    """The experts of this rank; arguments as Megatron-Core's SequentialMLP, with optional submodules."""

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: MLPSubmodules | None = None,
        pg_collection: Any = None,
    ):
        if config.add_bias_linear:
            raise ValueError(
                "moe_grouped_gemm=True has no biases: set add_bias_linear=False, or moe_grouped_gemm=False"
            )
        if submodules is None:
            submodules = MLPSubmodules(linear_fc1=Fp8ColumnParallelLinear, linear_fc2=Fp8RowParallelLinear)
        super().__init__(num_local_experts, config, submodules, pg_collection)

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Returns [T, hidden] for the experts' tokens [T, hidden], sorted by expert, with their router's
        probabilities [T].

        tokens_per_expert, int [experts], is needed on the host: dispatchers that send tokens have it there; otherwise
        it is copied once. torch.compile makes one graph for all token counts, unless experts are called separately.
        """
        if torch.compiler.is_compiling() and not self._fits_a_graph():
            from ...linear.compiled import break_graph  # loads torch's compiler

            result: tuple[torch.Tensor, None] = break_graph(
                self.forward, permuted_local_hidden_states, tokens_per_expert, permuted_probs
            )
            return result
        # Kernels and Megatron-Core round activations differently, so all experts must use the same.
        computes = {computes_activation(expert) for expert in self.local_experts}
        if len(computes) > 1 or not all(_is_plain(expert) for expert in self.local_experts):
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        x, probs = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input:
            assert self.config.moe_router_topk == 1, "moe_apply_probs_on_input works with one expert a token"
            x = (probs.unsqueeze(-1) * x).to(x.dtype)
            probs = torch.ones_like(probs)
        tokens = tokens_per_expert.cpu()
        x, probs = _after_pre_hooks(self.local_experts, tokens, x, probs)
        mlp = _Mlp(
            self.config,
            self.local_experts[0].activation_func,
            _Linears([expert.linear_fc1 for expert in self.local_experts], tokens, *computes),
            _Linears([expert.linear_fc2 for expert in self.local_experts], tokens, *computes),
        )
        output, _ = MLP.forward(mlp, x, per_token_scale=probs)
        return output, None

    def _fits_a_graph(self) -> bool:
        """Whether no code depends on an expert's rows: all experts are plain, in FP8, and without hooks."""
        linears = [
            linear for expert in self.local_experts for linear in (expert.linear_fc1, expert.linear_fc2)
        ]
        return all(
            _is_plain(expert) and not expert._forward_pre_hooks for expert in self.local_experts
        ) and all(
            _is_ours(linear) and linear.runs_fp8() and not linear._forward_pre_hooks for linear in linears
        )


class _Mlp(NamedTuple):
    """The attributes of an MLP that MLP.forward reads."""

    config: Any
    activation_func: Callable[..., torch.Tensor]
    linear_fc1: _Linears
    linear_fc2: _Linears


class _Linears(NamedTuple):
    """One linear of each expert, called as one: [T, K] to ([T, N], no bias).

    Attributes:
        tokens: of each expert, int [experts] on the CPU.
        computed: whether experts called one after the other defer activations to linear_fc2 (activation.py).
    """

    linears: list[Any]
    tokens: torch.Tensor
    computed: bool

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        joins = [_is_ours(linear) and linear.runs_fp8() for linear in self.linears]

        def alone(e: int, part: torch.Tensor) -> torch.Tensor:
            """Runs an expert in BF16, a wrapped one, or one with hooks, as Megatron-Core calls it."""
            y: torch.Tensor = self.linears[e](part)[0]
            return y

        return group_where_possible(x, self.tokens, joins, self._together, alone), None

    def makes_codes_of(self, role: str) -> bool:
        """Whether all experts' kernels make codes of this operand, as for one linear."""
        return self.computed and all(linear.makes_codes_of(role) for linear in self.linears)

    def _together(self, these: list[int], x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Returns [T, N] of these experts' tokens, in FP8 and in one call."""
        linears = [self.linears[e] for e in these]
        (x,) = _after_pre_hooks(linears, tokens, x)
        weights, training = [linear.weight for linear in linears], linears[0].training
        save_original_input = any(linear.save_original_input for linear in linears)
        options = {"training": training, "save_original_input": save_original_input}
        if torch.compiler.is_compiling():  # as for one linear, the operators do the rest at run time
            sites = [linear.fp8_site.active_site for linear in linears]
            return grouped_linear(x, weights, tokens, sites, **options)
        calls = [linear.begin_fp8() for linear in linears]
        sites, fresh = [site for site, _ in calls], [again for _, again in calls]
        return grouped_linear(x, weights, tokens, sites, fresh_weights=fresh, **options)


def _is_plain(expert: Any) -> bool:
    """Whether calling an expert runs only MLP.forward and its pre-hooks, as this class does."""
    return type(expert).forward is MLP.forward and not _has_hooks(expert) and not _has_any_global_hook()


def _is_ours(linear: Any) -> bool:
    """Whether a linear is this package's, without hooks other than pre-hooks."""
    return isinstance(linear, Fp8ColumnParallelLinear | Fp8RowParallelLinear) and not _has_hooks(linear)


def _has_hooks(module: Any) -> bool:
    """Whether a module has hooks that require calling the module itself."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks_with_kwargs
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _after_pre_hooks(
    modules: Sequence[Any], tokens: Tokens, *arguments: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Returns each argument [T, ...] after the modules' forward pre-hooks on their rows, as separate calls would run
    them.

    DistributedDataParallel waits for gathered parameters in such a hook.
    """
    if not any(module._forward_pre_hooks for module in modules):
        return arguments
    numbers = on_host(tokens)
    parts = list(zip(*(argument.split(numbers) for argument in arguments), strict=True))
    changed = False
    for e, module in enumerate(modules):
        for hook in module._forward_pre_hooks.values():
            returned = hook(module, parts[e])
            if returned is not None:
                parts[e], changed = returned if isinstance(returned, tuple) else (returned,), True
    return tuple(torch.cat(column) for column in zip(*parts, strict=True)) if changed else arguments
