"""Fp8Linear: nn.Linear with its GEMMs in FP8. Parameters, initialisation, state-dict keys and hooks are
nn.Linear's.

A linear has two references to FP8 state: its model's group (fp8_group.py) and its own sites there (sites.py).
They own everything else, so a class change, copy, pickle or move of the module has to handle these two only.

Fp8Layer is independent of the weight's layout; its other subclass is in conv1d.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized

from ..files.argument_check import check_tensor
from ..linear.amax_recorder import record_high_precision
from ..linear.function import fp8_linear
from ..linear.gemm_site import GemmSite
from ..linear.tensor_parallel import ShardInfo
from ..params.fp8_parameter import Fp8Parameter
from ..plan.autocast_state import AutocastState, autocasts, current_autocast_state, runs_fp8
from ..recipe import Recipe
from .config import Fp8Config, make_config
from .fp8_group import UNTRAINABLE, Fp8Group
from .sites import STANDALONE, LinearSites, rank

COMPUTED = ("_orig", "_g", "_v")
"""Suffixes of parameters from which hooks compute a weight: spectral_norm and prune; weight_norm."""


class Fp8Layer(torch.nn.Module):
    """Base of FP8 linear layers, for any weight layout: Fp8Linear, Fp8Conv1D.

    Attributes:
        plain_class: the class before the conversion; convert_from_fp8 restores it.
        fp8_group: FP8 state shared by the model's linears.
        fp8_sites: its GEMM sites in the group, under its name.
    """

    plain_class: type[torch.nn.Module]
    in_features: Any
    out_features: Any
    weight: Any
    bias: Any
    fp8_group: Fp8Group
    fp8_sites: LinearSites

    # --------------------------------------------------------------------------------------------------- group and sites

    def join_group(self, group: Fp8Group, name: str, *, also: tuple[str, ...] = ()) -> None:
        """Join a group under this name. ``also``: other names under which overrides match it."""
        self.fp8_group = group
        self.fp8_sites = group.join(self, name, (self.out_features, self.in_features), also=also)

    def leave_group(self) -> None:
        """Undo ``join_group``: remove all FP8 state; the class stays."""
        self.fp8_group.leave(self.fp8_sites)
        del self.fp8_group, self.fp8_sites

    @property
    def fp8_device(self) -> torch.device:
        """Device of its weight. Reads parameters, because computing a parametrised weight may change them."""
        if (weight := self.weight_parameter) is not None:
            return weight.device
        tensors = (*self.sources, vars(self).get("weight"), *self.buffers(), *self.parameters())
        device = next((tensor.device for tensor in tensors if tensor is not None), self.fp8_sites.ready_on)
        return self.weight.device if device is None else device

    def trainable_parameters(self) -> Iterator[torch.nn.Parameter]:
        """Parameters that an optimizer updates."""
        yield from self.parameters()

    @property
    def weight_parameter(self) -> torch.nn.Parameter | None:
        """The parameter that is or contains its weight; None for a computed weight."""
        return self._parameters.get("weight")

    @property
    def sources(self) -> list[torch.nn.Parameter]:
        """The parameter that is or contains its weight; for a computed weight, the parameters it is computed from."""
        if found := sources_of(self, "weight"):
            return found
        named = {name.removeprefix("parametrizations."): of for name, of in self.named_parameters()}
        return [parameter for name, parameter in named.items() if not name.startswith("bias")]

    @property
    def matrix(self) -> torch.Tensor:
        """The weight as [out_features, in_features]: the tensor itself or a view."""
        return self.as_matrix(self.weight)

    def as_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight``, in this layer's layout, as [out_features, in_features]: the tensor itself or a view."""
        return weight

    def to_stored_layout(self, matrix: torch.Tensor) -> torch.Tensor:
        """A matrix [out_features, in_features] in the unconverted layer's layout: the tensor itself or a view."""
        return matrix

    @property
    def fp8_name(self) -> str:
        """Its name in the converted model."""
        return self.fp8_sites.name

    @property
    def fp8_config(self) -> Fp8Config:
        """The config of its group."""
        return self.fp8_group.config

    @property
    def fp8_site(self) -> GemmSite:
        """Its GEMM site on the weight's device: plan, quantizers and slots."""
        return self.fp8_sites.on(self.fp8_device)

    @staticmethod
    def name_sites(model: torch.nn.Module) -> None:
        """Create the sites of all FP8 linears of the model, under their names in the model."""
        from .module_lookup import groups_of  # module_lookup.py imports this module

        for group in groups_of(model):
            group.make_all_sites()

    @property
    def fp8_share(self) -> ShardInfo:
        """This rank's shard: the whole weight, and its own tokens."""
        return ShardInfo(tokens=rank())

    def make_sites(self) -> bool:
        """Create the sites that a call needs now. Returns whether any was missing."""
        return self.fp8_sites.create_sites(self.fp8_device, current_autocast_state().recipe)

    def _prepare_sites(self) -> None:
        """make_sites, also where torch.compile traces."""
        if torch.compiler.is_dynamo_compiling():
            from ..linear.compiled import prepare_layer  # loads torch's compiler

            prepare_layer(self)
        else:
            self.make_sites()

    def _apply(self, fn: Any, recurse: bool = True) -> Fp8Layer:
        """Called by .to() and .cuda(). Drops cached codes on the old device and moves the histories."""
        with self.fp8_group.moving([self], lambda: self.sources):
            super()._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> Fp8Layer:
        """As nn.Module.train; warns once if the weights were prepared for inference."""
        if mode and is_prepared(self._parameters.get("weight")):
            self.fp8_group.say_untrainable()
        return super().train(mode)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        keys = [key for key in state_dict if key.startswith(prefix) and key != f"{prefix}bias"]
        if f"{prefix}weight" in keys or (
            keys and self.weight_parameter is None
        ):  # or the sources of a computed weight
            self.fp8_group.loads(self.fp8_sites)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A deep copy or a pickle has its own group and sites. A shallow copy joins the original's group."""
        super().__setstate__(state)
        if self.fp8_sites.linear is not self:
            self.fp8_sites = self.fp8_sites.of_copy(self, self.fp8_group)

    # ---------------------------------------------------------------------------------------------------------- forward

    def forward(self, input: Any) -> Any:
        """[..., in_features] -> [..., out_features]."""
        if not isinstance(input, torch.Tensor):
            return _call_in_graph(self, input)
        if input.is_nested:
            return _call_on_values(self, input)
        weight = self.weight  # read once: attribute access of parameters is slow
        if torch.compiler.is_compiling() and isinstance(weight, Fp8Parameter):
            from ..linear.compiled import break_graph  # loads torch's compiler

            # In this frame: Dynamo fails if an inner frame sees an Fp8Parameter before its layer.
            return break_graph(self.run, input, weight)
        return self.run(input, weight)

    def run(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The forward with this weight, in the layer's layout."""
        site, fp8, autocast = self.resolve_call(weight)
        if not fp8:
            return self._high_precision(input, weight, site, observe=not autocast.turns_off(site.plan))
        if autocasts(weight.device):
            input = input.to(torch.get_autocast_dtype(weight.device.type))
        return fp8_linear(input, self.as_matrix(weight), self.bias, site, training=self.training)

    def resolve_call(self, weight: torch.Tensor) -> tuple[GemmSite, bool, AutocastState]:
        """Resolves site and precision for this call: (site, whether FP8, autocast state)."""
        sites, device = self.fp8_sites, weight.device
        # Not .table: once Dynamo has read that dict, it does not see entries added here. The check adds no guard to
        # traced code that would differ between layers.
        if sites.ready_on != device:
            self._prepare_sites()
        site = sites.table[device, ""]
        if site.state.missing_end and self.training and site.state.must_end_first:
            raise RuntimeError(site.state.missing_end)
        autocast = sites.forwards.state_for_call(site, self.training)
        if autocast.label and site.is_fp8:
            self._prepare_sites()
            site = sites.by_recipe(device, autocast.label)
        own, site = site, site.active_site
        fp8 = runs_fp8(site, autocast)
        if type(weight) is not torch.nn.Parameter:
            check_weight(self.fp8_name, weight, fp8, not autocast.label and site is not own.healed)
        return site, fp8, autocast

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by torch.jit.script, which would compile the module's source. Raises RuntimeError."""
        raise RuntimeError(
            f"{self.fp8_name}: torch.jit.script does not compile an FP8 linear: use torch.compile, or script the model"
            " after convert_from_fp8(model)"
        )

    def _high_precision(
        self, x: torch.Tensor, weight: torch.Tensor, site: GemmSite, *, observe: bool
    ) -> torch.Tensor:
        """y [..., N] from the unconverted layer's forward. ``observe``: record amaxes for delayed scaling."""
        if isinstance(weight, Fp8Parameter):
            weight = self.to_stored_layout(weight.dequantize())
        y = self.plain_forward(x, weight)
        if not torch.compiler.is_compiling():
            self.fp8_sites.called = True
        return record_high_precision(
            x, self.as_matrix(weight), y, site, training=self.training, observe=observe
        )

    def plain_forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The forward of the original class, in high precision, with this weight."""
        return functional.linear(x, weight, self.bias)

    def extra_repr(self) -> str:
        """As nn.Linear, plus the recipe."""
        return f"{super().extra_repr()}, recipe={self.fp8_config.resolved_recipe!r}"


class Fp8Linear(Fp8Layer, torch.nn.Linear):
    """y = x @ weight^T + bias, with fprop, dgrad and wgrad in FP8.

    Args:
        in_features, out_features, bias, device, dtype: as for nn.Linear.
        recipe: as for convert_to_fp8; None is 'tensorwise'.
        config: an Fp8Config; use instead of ``recipe``.

    The input is [..., in_features], float32, bfloat16 or float16. The output is [..., out_features] in the
    input's dtype, or torch.autocast's. The weight may have another dtype; its gradient has the weight's
    dtype. NaN in the input gives NaN in the outputs that use it; Inf saturates. Both are counted
    (``fp8_step(model).nonfinite``). Dimensions that the hardware does not support are padded, never an error.

    FP8 runs without any context; ``fp8_autocast`` only overrides. In training, call ``fp8_step(model)`` once
    an iteration.

    Raises:
        ValueError: the recipe or config is wrong; the backend cannot run on the device, at the first forward;
            the input's last dimension is not in_features, or its dtype is unsupported.
        RuntimeError: an optimizer stepped and ``fp8_step`` was not called before the next forward in training
            mode.
    """

    plain_class = torch.nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        recipe: Recipe | str | None = None,
        config: Fp8Config | None = None,
    ):
        resolved = make_config(recipe, config)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.join_group(Fp8Group.standalone(resolved), STANDALONE)

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        recipe: Recipe | str | None = None,
        *,
        config: Fp8Config | None = None,
    ) -> Fp8Linear:
        """Converts one nn.Linear in place: only its class changes.

        Raises ValueError: the module is a subclass of nn.Linear, or no linear.
        """
        if type(linear) is not torch.nn.Linear:
            raise ValueError(
                f"from_linear({type(linear).__name__}): exactly an nn.Linear is needed, a subclass may compute"
                " something else in its forward"
            )
        group = Fp8Group.standalone(make_config(recipe, config))
        linear.__class__ = cls
        assert isinstance(linear, Fp8Linear)
        linear.join_group(group, STANDALONE)
        return linear


def sources_of(module: torch.nn.Module, name: str) -> list[torch.nn.Parameter]:
    """The parameter of this name, or the parameters from which a hook or a parametrization computes it."""
    candidates = [module._parameters.get(name + ending) for ending in ("", *COMPUTED)]
    found = [parameter for parameter in candidates if parameter is not None]
    if is_parametrized(module, name):
        computed: Any = module.parametrizations
        found += computed[name].parameters()
    return found


def is_prepared(weight: torch.Tensor | None) -> bool:
    """Whether the weight consists of codes from prepare_for_inference."""
    return isinstance(weight, Fp8Parameter) and not weight.is_gathered


def check_weight(name: str, weight: torch.Tensor, fp8: bool, own_recipe: bool) -> None:
    """Raises RuntimeError for a weight that is not a plain parameter and that this call cannot use.

    Args:
        fp8: the call runs in FP8.
        own_recipe: by the linear's own recipe, which also produced the weight's codes.
    """
    if hasattr(weight, "to_local"):
        raise RuntimeError(
            f"{name}: its weight is a DTensor, and FP8 multiplies whole matrices: for tensor parallelism use"
            " megatron_fp8.mcore; under fully_shard call the module that was sharded, not a part of it"
        )
    if hasattr(weight, "fsdp_pre_all_gather"):
        raise RuntimeError(
            f"{name}: enable_fp8_all_gather prepared its weight for fully_shard, which has not been called"
        )
    if weight.requires_grad and is_prepared(weight):
        raise RuntimeError(f"{name}: {UNTRAINABLE}")
    if not isinstance(weight, Fp8Parameter) or (fp8 and own_recipe):
        return
    if weight.is_gathered:
        raise RuntimeError(
            f"{name}: its weight was gathered as FP8 codes, so it cannot run in high precision or by another recipe here:"
            " leave enable_fp8_all_gather out to use fp8_autocast with fully_shard"
        )
    if fp8:
        raise RuntimeError(
            f"{name}: its weight lives as codes of the model's own recipe, and another one would have other codes: leave"
            " fp8_autocast(recipe=...) out, or call megatron_fp8.nn.dequantize_weights(model) first"
        )


# ----------------------------------------------------------------------------------------------------- unusual inputs


def _call_in_graph(module: torch.nn.Module, proxy: Any) -> torch.fx.Proxy:
    """Records a call of the module as one node of a torch.fx.symbolic_trace graph, as for nn.Linear.

    Raises:
        ValueError: the trace's root is the module itself.
        TypeError: the input is neither a tensor nor an fx proxy.
    """
    if not isinstance(proxy, torch.fx.Proxy):
        check_tensor(getattr(module, "fp8_name", "") or type(module).__name__, proxy)
    tracer: Any = proxy.tracer
    if tracer.root is module:
        raise ValueError("torch.fx cannot trace an FP8 linear itself: put it into a module and trace that")
    node: torch.fx.Proxy = tracer.create_proxy("call_module", tracer.path_of_module(module), (proxy,), {})
    return node


def _call_on_values(module: torch.nn.Module, nested: torch.Tensor) -> torch.Tensor:
    """The module's forward on the tokens of a jagged nested tensor [batch, ragged, ..., in_features].

    Raises ValueError: the layout is not torch.jagged, or the ragged dimension is the last.
    """
    jagged: Any = nested
    if nested.layout is not torch.jagged or jagged._ragged_idx == nested.ndim - 1:
        raise ValueError(
            "an FP8 linear takes nested tensors whose layout is torch.jagged and whose last dimension is the same for"
            " all: torch.nested.nested_tensor(list, layout=torch.jagged)"
        )
    if jagged.lengths() is not None:  # uninitialised memory between sequences would be cast too
        jagged = jagged.contiguous()
    return torch.nested.nested_tensor_from_jagged(
        module.forward(jagged.values()),
        jagged.offsets(),
        jagged_dim=jagged._ragged_idx,
        min_seqlen=jagged._maybe_min_seqlen,
        max_seqlen=jagged._maybe_max_seqlen,
    )
