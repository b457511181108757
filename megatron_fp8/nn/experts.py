"""Fp8Experts: experts with stacked parameters [experts, out, in], in FP8.

A conversion changes the module's class to a subclass of Fp8Experts and of the module's own class. Parameters,
state-dict keys, hooks and isinstance checks stay the same. Each expert's linear has its own site and name
(``mlp.experts.3.gate_up``), with its own amaxes, histories and scales. One grouped GEMM computes all experts
(linear/linear_ops.py). Each linear is also a small submodule without parameters, which can be called and hooked
alone; so code that iterates over a model's FP8 linears (reports, telemetry, calibration, inference) finds it.

Rejected: a ModuleList of linears instead of the stack. Checkpoints, optimizers and fully_shard would see
other parameters than the model's.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..linear.function import Tokens, group_where_possible, grouped_linear
from ..params.fp8_parameter import Fp8Parameter
from ..plan.autocast_state import autocasts, current_autocast_state
from .config import Fp8Config
from .expert_modules import Kind, Stack, kind_of
from .fp8_group import Fp8Group
from .linear import COMPUTED, Fp8Layer, check_weight, sources_of


class Fp8ExpertLinear(Fp8Layer):
    """One linear of one expert, with its own site. Its weight is a slice of the stack in the parent module.

    A call runs this linear alone. The parent module calls it where a grouped GEMM cannot: in high precision,
    or if hooks are registered.
    """

    plain_class = torch.nn.Module
    bias = None

    def __init__(self, experts: Fp8Experts, stack: Stack, number: int):
        super().__init__()
        self.out_features, self.in_features = stack.features(experts)
        self._stack, self._number = stack, number
        self._around: weakref.ref[Fp8Experts] | None = weakref.ref(experts)

    @property
    def around(self) -> Fp8Experts:
        """The parent expert module. Raises RuntimeError if it no longer exists."""
        around = None if self._around is None else self._around()
        if around is None:
            raise RuntimeError(
                "the expert module that contains this FP8 linear no longer exists: keep a reference to it"
            )
        return around

    def attach(self, experts: Fp8Experts) -> None:
        """Attach this copy to the copied parent module."""
        if self._around is None:
            self._around = weakref.ref(experts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_around": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8ExpertLinear:
        """Copies the linear within a copy of its parent. torch copies a parametrised module without calling
        __setstate__."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        around = memo.get(id(self._around())) if self._around is not None else None
        if around is not None:
            copied.attach(around)
        return copied

    @property
    def weight(self) -> Any:
        """[out, in], or [in, out] if the stack is transposed. After prepare_for_inference: the prepared weight."""
        own = self._parameters.get("weight")
        return getattr(self.around, self._stack.parameter)[self._number] if own is None else own

    @property
    def weight_parameter(self) -> torch.nn.Parameter | None:
        """The stack; the prepared weight after prepare_for_inference; None if the stack is parametrised."""
        own = self._parameters.get("weight")
        return self.around._parameters.get(self._stack.parameter) if own is None else own

    @property
    def sources(self) -> list[torch.nn.Parameter]:
        """``weight_parameter`` as a list, or the parameters from which torch computes the stack."""
        own = self._parameters.get("weight")
        if own is not None:
            return [own]
        return sources_of(self.around, self._stack.parameter) or list(self.around.parameters(recurse=False))

    def values(self) -> dict[Any, int]:
        """(parameter id, expert number) -> number of values that belong to this linear."""
        names = [name for name in (self._stack.parameter, self._stack.bias) if name]
        parameters = [parameter for name in names for parameter in sources_of(self.around, name)]
        return {
            (id(parameter), self._number): parameter.numel() // self.around.fp8_count
            for parameter in parameters
        }

    def trainable_parameters(self) -> Iterator[torch.nn.Parameter]:
        """The stack or its source parameters, and the module's other parameters."""
        yield from self.around.parameters(recurse=False)
        yield from self.sources

    def as_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """The slice as [out_features, in_features]."""
        return weight.t() if self._stack.transposed and not isinstance(weight, Fp8Parameter) else weight

    def to_stored_layout(self, matrix: torch.Tensor) -> torch.Tensor:
        """The matrix in the stack's layout."""
        return matrix.t() if self._stack.transposed else matrix

    def forward(self, input: Any, weight: torch.Tensor | None = None) -> Any:
        """[..., in_features] -> [..., out_features]. ``weight``: the slice of the stack, if the caller has it
        already."""
        return self.run(input, self.weight if weight is None else weight)

    def plain_forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x @ weight^T in high precision, as in the unconverted module."""
        return torch.nn.functional.linear(x, self.as_matrix(weight))

    def extra_repr(self) -> str:
        """The sizes, and the recipe."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" recipe={self.fp8_config.resolved_recipe!r}"
        )


class Fp8Experts(torch.nn.Module):
    """Mixin that turns an expert module into its FP8 version.

    Attributes:
        plain_class: the class before the conversion; convert_from_fp8 restores it.
        kind: the implementation of its forward.
        fp8_name: its name in the converted model.
    """

    plain_class: type[torch.nn.Module]
    kind: Kind
    fp8_name: str
    fp8_group: Fp8Group

    # ------------------------------------------------------------------------------------------------- group and linears

    def join_group(self, group: Fp8Group, name: str) -> None:
        """Create the linears and sites of all experts in a model's group. ``name``: the module's name there."""
        self.fp8_group, self.fp8_name, self.fp8_count = group, name, expert_count(self, self.fp8_stacks)
        for number in range(self.fp8_count):
            linears = {stack.label: Fp8ExpertLinear(self, stack, number) for stack in self.fp8_stacks}
            self.add_module(str(number), torch.nn.ModuleDict(linears))
            for stack in self.fp8_stacks:
                site = site_name(name, number, stack)
                linears[stack.label].join_group(group, site, also=override_names(name, stack))

    def leave_group(self) -> None:
        """Undo ``join_group``. Weights prepared for inference are dequantized and stacked again."""
        self.join_stacks()
        for linear in self.fp8_linears():
            linear.leave_group()
        for number in range(self.fp8_count):
            delattr(self, str(number))
        del self.fp8_group, self.fp8_name, self.fp8_count

    @property
    def fp8_stacks(self) -> tuple[Stack, ...]:
        """Its stacked parameters."""
        return self.kind.stacks(self)

    @property
    def fp8_config(self) -> Fp8Config:
        """The config of its group."""
        return self.fp8_group.config

    def fp8_linears(self, stack: Stack | None = None) -> list[Fp8ExpertLinear]:
        """The experts' linears in expert order; only those of ``stack`` if given."""
        stacks = self.fp8_stacks if stack is None else (stack,)
        modules: Any = self._modules
        return [modules[str(number)][of.label] for number in range(self.fp8_count) for of in stacks]

    def _apply(self, fn: Any, recurse: bool = True) -> Fp8Experts:
        """Called by .to() and .cuda(). Drops cached codes on the old device and moves the histories."""
        sources = lambda: [of for stack in self.fp8_stacks for of in sources_of(self, stack.parameter)]  # noqa: E731
        with self.fp8_group.moving(self.fp8_linears(), sources):
            super()._apply(fn, recurse)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for linear in self.fp8_linears():
            linear.attach(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the original class, because the FP8 class is created at run time."""
        reduced: Any = super().__reduce_ex__(protocol)
        return _empty, (self.plain_class,), *reduced[2:]

    # ------------------------------------------------------------------------------------------------------------ forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original class's forward with its GEMMs in FP8. torch.compile breaks the graph if an expert must be
        called alone, since its row count is on the host."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if torch.compiler.is_compiling():
            if current_autocast_state().off == "all":
                return self.plain_class.forward(self, *args, **kwargs)
            if not self._fits_a_graph():
                from ..linear.compiled import break_graph  # loads torch's compiler

                return break_graph(self.kind.forward, self, *args, **kwargs)
        elif any(x.is_meta or isinstance(x, FakeTensor) for x in tensors):  # no values to route by
            return self.plain_class.forward(self, *args, **kwargs)
        return self.kind.forward(self, *args, **kwargs)

    def _fits_a_graph(self) -> bool:
        """Whether one grouped call multiplies all experts, by weights that Dynamo can trace."""
        for stack in self.fp8_stacks:
            for linear in self.fp8_linears(stack):
                sources = linear.sources  # a parametrised stack is computed at the multiplication
                weight = sources[0] if sources else linear.weight
                if (
                    isinstance(weight, Fp8Parameter)
                    or has_hooks(linear)
                    or not linear.resolve_call(weight)[1]
                ):
                    return False
        return True

    def multiplied(
        self, stack: Stack, x: torch.Tensor, tokens: torch.Tensor, of_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, out] from the experts' tokens [T, in], sorted by expert: the product with a stack, plus its
        biases.

        Args:
            tokens: tokens per expert, int [experts] on the CPU.
            of_rows: expert of each row, int [T]; needed if there are biases.
        """
        linears, weights = self.fp8_linears(stack), self._weights(stack)
        device = weights[0].device
        calls = [linear.resolve_call(weight) for linear, weight in zip(linears, weights, strict=True)]
        in_group = [fp8 and not has_hooks(linear) for linear, (_, fp8, _) in zip(linears, calls, strict=True)]

        def alone(e: int, part: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = linears[e](part, weights[e])
            return y

        def together(these: list[int], part: torch.Tensor, numbers: Tokens) -> torch.Tensor:
            sites = [calls[e][0] for e in these]
            if autocasts(device):
                part = part.to(torch.get_autocast_dtype(device.type))
            matrices = [linears[e].as_matrix(weights[e]) for e in these]
            return grouped_linear(part, matrices, numbers, sites, training=self.training)

        y = group_where_possible(x, tokens, in_group, together, alone)
        if stack.bias is None:
            return y
        assert of_rows is not None, "biases are added by row"
        return y + getattr(self, stack.bias).index_select(0, of_rows)  # same addition as the original forward

    def _weights(self, stack: Stack) -> list[Any]:
        """Each expert's matrix, in the stack's layout."""
        linears = self.fp8_linears(stack)
        if "weight" in linears[0]._parameters:  # the stack was split for inference
            return [linear.weight for linear in linears]
        stacked = getattr(self, stack.parameter)
        if type(stacked) is not torch.nn.Parameter:
            check_weight(f"{self.fp8_name}.{stack.parameter}", stacked, True, True)
        return list(stacked.unbind(0))

    # ---------------------------------------------------------------------------------------------------------- inference

    def split_stacks(self) -> None:
        """Split stacks of which some linears' weights became codes. The other linears get copies of their slices, and
        the stacks are freed."""
        for stack in self.fp8_stacks:
            linears = self.fp8_linears(stack)
            if stack.parameter not in self._parameters or not any("weight" in x._parameters for x in linears):
                continue
            for linear in linears:
                if "weight" not in linear._parameters:
                    plain = torch.nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
                    linear._parameters["weight"] = plain
            del self._parameters[stack.parameter]

    def _already_split(self) -> list[Stack]:
        return [stack for stack in self.fp8_stacks if "weight" in self.fp8_linears(stack)[0]._parameters]

    def _whole(self, stack: Stack) -> torch.Tensor:
        """A split stack, dequantized."""
        found = []
        for linear in self.fp8_linears(stack):
            weight = linear.weight.detach()
            is_fp8 = isinstance(weight, Fp8Parameter)
            found.append(linear.to_stored_layout(weight.dequantize()) if is_fp8 else weight)
        return torch.stack(found)

    def join_stacks(self) -> None:
        """Undo ``split_stacks``: stacks in high precision, without gradients."""
        for stack in self._already_split():
            self._parameters[stack.parameter] = torch.nn.Parameter(self._whole(stack), requires_grad=False)
            for linear in self.fp8_linears(stack):
                del linear._parameters["weight"]

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Has the keys and shapes of the unconverted module; FP8 weights are dequantized."""
        found = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        for stack in self._already_split():
            for number in range(self.fp8_count):
                del found[f"{prefix}{number}.{stack.label}.weight"]
            found[f"{prefix}{stack.parameter}"] = self._whole(stack)
        return found

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for stack in self.fp8_stacks:
            computed = f"{prefix}parametrizations.{stack.parameter}."
            named = {f"{prefix}{stack.parameter}{ending}" for ending in ("", *COMPUTED)}
            if any(key in named or key.startswith(computed) for key in state_dict):
                for linear in self.fp8_linears(stack):
                    self.fp8_group.loads(linear.fp8_sites)
        for stack in self._already_split():
            if (stacked := state_dict.pop(f"{prefix}{stack.parameter}", None)) is not None:
                for number, linear in enumerate(self.fp8_linears(stack)):
                    matrix = (
                        linear.as_matrix(stacked[number])
                        if isinstance(linear.weight, Fp8Parameter)
                        else stacked[number]
                    )
                    state_dict[f"{prefix}{number}.{stack.label}.weight"] = matrix
        super()._load_from_state_dict(state_dict, prefix, *args)


_classes: dict[type[torch.nn.Module], type[Fp8Experts]] = {}  # plain class -> that of its converted modules


def fp8_experts_class(plain_class: type[torch.nn.Module]) -> type[Fp8Experts] | None:
    """The FP8 class for this expert class; None if unsupported."""
    if plain_class not in _classes:
        kind = kind_of(plain_class)
        if kind is None:
            return None
        members = {"plain_class": plain_class, "kind": kind, "__doc__": Fp8Experts.__doc__}
        _classes[plain_class] = type(f"Fp8{plain_class.__name__}", (Fp8Experts, plain_class), members)
    return _classes[plain_class]


def _empty(plain_class: type[torch.nn.Module]) -> Any:
    """A converted module without state, for copies and pickles."""
    in_fp8 = fp8_experts_class(plain_class)
    assert in_fp8 is not None
    return in_fp8.__new__(in_fp8)


def expert_count(module: torch.nn.Module, stacks: tuple[Stack, ...]) -> int:
    """How many experts a module has."""
    return len(getattr(module, stacks[0].parameter))


def site_name(name: str, number: int, stack: Stack) -> str:
    """Site name of an expert's linear. ``name``: the module's name."""
    return ".".join(filter(None, [name, str(number), stack.label]))


def override_names(name: str, stack: Stack) -> tuple[str, ...]:
    """Other names for overrides: the module, and the stacked parameter."""
    return tuple(filter(None, [name, ".".join(filter(None, [name, stack.parameter]))]))


def has_hooks(linear: torch.nn.Module) -> bool:
    """Whether hooks are registered on this linear, so that it must be called alone."""
    return bool(
        linear._forward_hooks
        or linear._forward_pre_hooks
        or linear._backward_hooks
        or linear._backward_pre_hooks
    )
