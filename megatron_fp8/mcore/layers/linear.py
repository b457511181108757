"""Megatron-Core's column- and row-parallel linears with their GEMMs in FP8, by the plan.

Everything but the GEMMs is Megatron's: parameters, initialisation, bias handling, checkpoints. A site planned in BF16
runs Megatron's own code, so its numbers are Megatron's. ``linear_qkv`` and ``linear_fc1`` hold fused projections
(query, key and value; gate and up): one GEMM each, in Megatron's layout.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch.utils._python_dispatch import _disable_current_modes

from ...fp8_utils import quantizes
from ...linear.amax_recorder import record_high_precision
from ...linear.function import fp8_linear
from ...linear.gemm_site import GemmSite
from ...linear.tensor_parallel import ALONE, ShardInfo, TensorParallel
from ...plan.autocast_state import AutocastState, Forwards, layer_being_built, runs_fp8
from ..checkpoint.state_dict import sharded_slots, take_slots
from ..patches.patching import PatchList
from ..sites import make_site, prepare, share_of

patches = PatchList()


class _Fp8Site:
    """Adds the layer's number and the GEMM site to Megatron's linears."""

    config: Any
    training: bool
    is_expert: bool
    weight: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fp8_layer = layer_being_built()
        self.is_first_microbatch = True  # Megatron sets it at the start of every iteration
        self.save_original_input = False  # Megatron sets it where the input is recomputed anyway
        self._site: GemmSite | None = None
        self._sited = False
        self._forwards = Forwards()

    @staticmethod
    def name_sites(model: Any) -> None:
        """Gives every FP8 linear of the model its named site, unless done before."""
        prepare([model])

    def bind_fp8_site(self, site: GemmSite) -> None:
        """Sets the site of the model's plan for this layer."""
        self._site, self._sited = site, True
        site.layer = weakref.ref(self)

    @property
    def fp8_site(self) -> GemmSite:
        """This layer's site; a layer outside any prepared model resolves its own."""
        # _sited and not `_site is None`: a tracer that has read _site would not see the new value.
        if not self._sited:
            if torch.compiler.is_dynamo_compiling():
                from ...linear.compiled import prepare_layer  # loads torch's compiler

                prepare_layer(self)
            else:
                self.make_sites()
        assert self._site is not None
        return self._site

    @property
    def fp8_share(self) -> ShardInfo:
        """This rank's part of the site."""
        kind: Any = "column" if isinstance(self, ColumnParallelLinear) else "row"
        return share_of(kind, expert=self.is_expert)

    def __getstate__(self) -> dict[str, Any]:
        """Drops the site: a copy belongs to another model, whose plan gives it a site."""
        return {**self.__dict__, "_site": None, "_sited": False, "_forwards": Forwards()}

    def make_sites(self) -> bool:
        """Resolves this layer on its own, unless a model's plan has. Returns whether it did."""
        missing = self._site is None
        if missing:
            with _disable_current_modes():  # the site must have no fake or traced tensors
                self.bind_fp8_site(make_site(self, type(self).__name__))
        return missing

    def _called(self) -> tuple[GemmSite, AutocastState, bool]:
        """Returns this call's site, its autocast state (in a recomputation the forward's), and whether it uses FP8."""
        site = self.fp8_site
        autocast, active = self._forwards.state_for_call(site, self.training), site.active_site
        return active, autocast, runs_fp8(active, autocast)

    def runs_fp8(self) -> bool:
        """Whether the next forward uses FP8."""
        return self._called()[2]

    def makes_codes_of(self, role: str) -> bool:
        """Whether the next call's kernels read this operand only to make codes, so that it may be a LazyTensor."""
        if torch.compiler.is_compiling() or (role == "input" and self.save_original_input):
            return False
        return self.fp8_site.active_site.computes(role) and self.runs_fp8()

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Megatron's, and the state of delayed scaling if the model's sites have names."""
        found = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        return found if self._site is None else {**found, **sharded_slots(self, prefix, sharded_offsets)}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        take_slots(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def begin_fp8(self) -> tuple[GemmSite, bool]:
        """Starts an FP8 call; returns its site, and whether its weight must be quantized again.

        RuntimeError: the last iteration was not ended.
        """
        site = self.fp8_site.active_site
        if site.state.missing_end and self.training and site.state.must_end_first:
            raise RuntimeError(site.state.missing_end)
        if fresh := self.is_first_microbatch:
            self.is_first_microbatch = False  # only if needed: setting a module's attribute is slow
        return site, fresh

    def _fp8_forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        site: GemmSite,
        tp: TensorParallel,
    ) -> torch.Tensor:
        training, saves_input = self.training, self.save_original_input
        # Compiled code would guard on is_first_microbatch if it read it; its operators do the rest at run time.
        if torch.compiler.is_compiling():
            return fp8_linear(x, weight, bias, site, tp, training=training, save_original_input=saves_input)
        site, fresh = self.begin_fp8()
        return fp8_linear(
            x, weight, bias, site, tp, training=training, fresh_weight=fresh, save_original_input=saves_input
        )

    def _after_high_precision(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        y: torch.Tensor,
        autocast: AutocastState,
        *,
        shard: bool = False,
    ) -> torch.Tensor:
        site = self.fp8_site.active_site
        on = not autocast.turns_off(site.plan)
        return record_high_precision(x, weight, y, site, training=self.training, observe=on, shard=shard)


class Fp8ColumnParallelLinear(_Fp8Site, ColumnParallelLinear):
    """Y = X A^T with A split by output features; arguments as Megatron-Core's ColumnParallelLinear."""

    tensor_model_parallel, partition_dim = True, 0  # Megatron-Bridge reads them to split weights

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        site, autocast, fp8 = self._called()
        if not fp8:
            y = super()._forward_impl(input, weight, *args, **kwargs)
            return self._after_high_precision(input, weight, y, autocast, shard=kwargs["sequence_parallel"])
        assert not args, "Megatron-Core 0.16 passes everything but input and weight by keyword"
        assert kwargs.get("grad_output_buffer") is None, (
            "deferred wgrad is the output layer's, which is not FP8"
        )
        sequence_parallel, reduce_dgrad = kwargs["sequence_parallel"], kwargs["allreduce_dgrad"]
        tp = ALONE
        if sequence_parallel or reduce_dgrad:
            tp = TensorParallel.of(
                "column", kwargs["tp_group"], sequence_parallel=sequence_parallel, reduce_dgrad=reduce_dgrad
            )
        return self._fp8_forward(input, weight, kwargs["bias"], site, tp)


class Fp8RowParallelLinear(_Fp8Site, RowParallelLinear):
    """Y = X A^T with A split by input features; arguments as Megatron-Core's RowParallelLinear."""

    tensor_model_parallel, partition_dim = True, 1  # Megatron-Bridge reads them to split weights

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        site, autocast, fp8 = self._called()
        if not fp8:
            y = super()._forward_impl(input, weight, *args, **kwargs)
            return self._after_high_precision(input, weight, y, autocast)
        return self._fp8_forward(input, weight, kwargs["bias"], site, ALONE)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As Megatron's; with sequence parallelism it does the reduce-scatter, so that its backward gathers codes."""
        if not self.sequence_parallel or self.explicit_expert_comm:
            return super().forward(input_)
        site, _, fp8 = self._called()
        if not fp8:
            return super().forward(input_)
        tp = TensorParallel.of("row", self.tp_group, sequence_parallel=True)
        output = self._fp8_forward(input_, self.weight, None, site, tp)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None


class Fp8OutputLayer(Fp8ColumnParallelLinear):
    """A vocabulary-parallel output projection, y [s, b, V / tp] = x [s, b, hidden] @ weight^T, as a GEMM site.

    No spec names this linear: a model makes it itself, of Megatron-Core's class, and then sets it up together with the
    embedding to which it may be tied. There it is replaced, with its weight.

        tied      weight is the embedding's, passed with each call; codes are made of it, and lookups read its BF16 values
        untied    weight is the layer's own

    Either way the weight stays BF16 (fp8_param skips it): two pipeline stages hold copies of a tied one, and both must
    step alike.

    Rejected: replacing the class in the module that makes the layer. That module takes it from Megatron-Core's
    `tensor_parallel` package, which every other model uses too.

    Args:
        plain: Megatron-Core's layer, whose parameters it uses.
        embedding: returns the embedding's weight [V / tp, hidden], for a ``plain`` without a weight.
    """

    def __init__(self, plain: ColumnParallelLinear, embedding: Callable[[], torch.Tensor]):
        super().__init__(
            plain.input_size,
            plain.output_size,
            config=plain.config,
            init_method=plain.config.init_method,
            bias=False,
            gather_output=plain.gather_output,
            skip_bias_add=plain.skip_bias_add,
            skip_weight_param_allocation=True,
            tp_group=plain.tp_group,
        )
        self.weight, self.bias = plain.weight, plain.bias
        self._embedding = embedding

    @property
    def tied_weight(self) -> torch.Tensor:
        """The embedding's weight, which this layer uses if it has none of its own."""
        return self._embedding()


@patches.wrap(
    "models.common.language_module.language_module.LanguageModule.setup_embeddings_and_output_layer",
    "a model makes its output layer itself, and no spec names it",
)
def output_layer_in_fp8(original: Callable[[Any], None], self: Any) -> None:
    """With fp8_output_layer the output layer becomes an FP8 site.

    ValueError: its class is not Megatron-Core's.
    """
    original(self)
    config = self.config
    if not (self.post_process and quantizes(config) and getattr(config, "fp8_output_layer", False)):
        return
    if type(self.output_layer) is not ColumnParallelLinear:
        raise ValueError(
            f"fp8_output_layer=True: {type(self).__name__}'s output_layer is a {type(self.output_layer).__name__},"
            " whose own forward runs in BF16. Make it a ColumnParallelLinear, or set fp8_output_layer=False"
        )
    self.output_layer = Fp8OutputLayer(self.output_layer, self.shared_embedding_or_output_weight)
