"""Fp8Experts: experts with stacked parameters [experts, out, in], in FP8.

Like a linear it is converted by changing its class, to one that is made of Fp8Experts and the module's own: parameters,
state-dict keys, hooks and isinstance are as they were. Each expert's linear is a site of its own, under its own name
(``mlp.experts.3.gate_up``), with amaxes, histories and scales that no other expert shares, and the products of all
experts are one call (linear/grouped.py). What walks a model by its FP8 linears, such as reports, telemetry, calibration
and inference, finds them as small modules inside, without parameters, which can be called and listened to alone.

Rejected: a ModuleList of linears in the place of the stack. Checkpoints, optimizers and fully_shard would see other
parameters than the model's.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..linear.grouped import Tokens, grouped_linear, some_together
from ..params.fp8_parameter import Fp8Parameter
from ..plan.switch import autocasts, current_switch, without_autocast
from .config import Fp8Config
from .expert_kinds import Kind, Stack, kind_of
from .group import Fp8Group
from .linear import COMPUTED, Fp8Layer, check_weight, sources_of


class Fp8ExpertLinear(Fp8Layer):
    """One linear of one expert: its site. Its weight is a matrix of the stack, which the module around it holds.

    Calling it runs it alone; the module around it does so where a group cannot: out of FP8, or where hooks listen.
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
        """The module of experts that this is in. RuntimeError: it is gone."""
        around = None if self._around is None else self._around()
        if around is None:
            raise RuntimeError(
                "the experts that this FP8 linear is one of are gone: keep the module that has them"
            )
        return around

    def stand_in(self, experts: Fp8Experts) -> None:
        """Be one of these experts' linears, those that were copied along with this."""
        if self._around is None:
            self._around = weakref.ref(experts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_around": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8ExpertLinear:
        """In the copy of the module around it: torch copies a parametrised module without its __setstate__."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        around = memo.get(id(self._around())) if self._around is not None else None
        if around is not None:
            copied.stand_in(around)
        return copied

    @property
    def weight(self) -> Any:
        """[out, in], or [in, out] as the stack has it; what inference made of it, once it did."""
        own = self._parameters.get("weight")
        return getattr(self.around, self._stack.parameter)[self._number] if own is None else own

    @property
    def held(self) -> torch.nn.Parameter | None:
        """The stack; what inference made of its part, once it did; None where the stack is computed."""
        own = self._parameters.get("weight")
        return self.around._parameters.get(self._stack.parameter) if own is None else own

    @property
    def sources(self) -> list[torch.nn.Parameter]:
        """``held``; those from which the stack is computed."""
        own = self._parameters.get("weight")
        if own is not None:
            return [own]
        return sources_of(self.around, self._stack.parameter) or list(self.around.parameters(recurse=False))

    def values(self) -> dict[Any, int]:
        """How many values of the module's parameters are its own, by something that tells parameters apart."""
        names = [name for name in (self._stack.parameter, self._stack.bias) if name]
        parameters = [whole for name in names for whole in sources_of(self.around, name)]
        return {(id(whole), self._number): whole.numel() // self.around.fp8_count for whole in parameters}

    def trained(self) -> Iterator[torch.nn.Parameter]:
        """The stack, or what it is computed from, and what else the module has."""
        yield from self.around.parameters(recurse=False)
        yield from self.sources

    def as_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """A matrix of the stack as [out_features, in_features]."""
        return weight.t() if self._stack.transposed and not isinstance(weight, Fp8Parameter) else weight

    def laid_out(self, matrix: torch.Tensor) -> torch.Tensor:
        """As the stack has it."""
        return matrix.t() if self._stack.transposed else matrix

    def forward(self, input: Any, weight: torch.Tensor | None = None) -> Any:
        """[..., in_features] -> [..., out_features]; ``weight``: its part of the stack, which the caller has at hand."""
        return self.run(input, self.weight if weight is None else weight)

    def plain_forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x @ weight^T, as the unconverted module multiplies."""
        return torch.nn.functional.linear(x, self.as_matrix(weight))

    def extra_repr(self) -> str:
        """The sizes, and the recipe."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" recipe={self.fp8_config.resolved_recipe!r}"
        )


class Fp8Experts(torch.nn.Module):
    """What a module of experts is in FP8, beside its own class.

    Attributes:
        plain_class: what convert_to_fp8 made it of, and convert_from_fp8 makes it again.
        kind: how it computes.
        fp8_name: its name in the model that was converted.
    """

    plain_class: type[torch.nn.Module]
    kind: Kind
    fp8_name: str
    fp8_group: Fp8Group

    # --------------------------------------------------------------------------------------------------- its place in FP8

    def join_group(self, group: Fp8Group, name: str) -> None:
        """Have a site for each expert and stack in a model's group; ``name`` is the module's there."""
        self.fp8_group, self.fp8_name, self.fp8_count = group, name, count_of(self, self.fp8_stacks)
        for number in range(self.fp8_count):
            linears = {stack.label: Fp8ExpertLinear(self, stack, number) for stack in self.fp8_stacks}
            self.add_module(str(number), torch.nn.ModuleDict(linears))
            for stack in self.fp8_stacks:
                site = site_name(name, number, stack)
                linears[stack.label].join_group(group, site, also=also_called(name, stack))

    def leave_group(self) -> None:
        """Undo it; what inference made of the weights becomes a stack again."""
        self._stack_again()
        for linear in self.fp8_linears():
            linear.leave_group()
        for number in range(self.fp8_count):
            delattr(self, str(number))
        del self.fp8_group, self.fp8_name, self.fp8_count

    @property
    def fp8_stacks(self) -> tuple[Stack, ...]:
        """Its parameters that are stacks."""
        return self.kind.stacks(self)

    @property
    def fp8_config(self) -> Fp8Config:
        """How it runs."""
        return self.fp8_group.config

    def fp8_linears(self, stack: Stack | None = None) -> list[Fp8ExpertLinear]:
        """The experts' linears, expert by expert; those of one stack."""
        stacks = self.fp8_stacks if stack is None else (stack,)
        modules: Any = self._modules
        return [modules[str(number)][of.label] for number in range(self.fp8_count) for of in stacks]

    def _apply(self, fn: Any, recurse: bool = True) -> Fp8Experts:
        """Where .to() and .cuda() move it: no codes stay on the old device, and histories come along."""
        linears = self.fp8_linears()
        before = [linear.fp8_device for linear in linears]
        with self.fp8_group.left.moving(
            lambda: [of for stack in self.fp8_stacks for of in sources_of(self, stack.parameter)]
        ):
            super()._apply(fn, recurse)
        left = set()
        for linear, device in zip(linears, before, strict=True):
            if linear.fp8_device != device:
                linear.fp8_sites.leave(device)
                left.add(device)
        for device in left:
            self.fp8_group.leave_device(device)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for linear in self.fp8_linears():
            linear.stand_in(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Its class has no name to be found by: a copy makes it of the plain one."""
        reduced: Any = super().__reduce_ex__(protocol)
        return _empty, (self.plain_class,), *reduced[2:]

    # ------------------------------------------------------------------------------------------------------------ forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the plain class's, with its products in FP8. torch.compile leaves it out of its graphs where an expert is
        called apart, on rows that the host has to know."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if torch.compiler.is_compiling():
            if current_switch().off == "all":
                return self.plain_class.forward(self, *args, **kwargs)
            if not self._fits_a_graph():
                from ..linear.compiled import break_graph  # loads torch's compiler

                return break_graph(self.kind.forward, self, *args, **kwargs)
        elif any(x.is_meta or isinstance(x, FakeTensor) for x in tensors):  # without numbers to route by
            return self.plain_class.forward(self, *args, **kwargs)
        return self.kind.forward(self, *args, **kwargs)

    def _fits_a_graph(self) -> bool:
        """Whether all experts are multiplied in one call, by weights that a tracer knows."""
        for stack in self.fp8_stacks:
            for linear in self.fp8_linears(stack):
                sources = linear.sources  # a stack that is computed is so when it is multiplied
                weight = sources[0] if sources else linear.weight
                if isinstance(weight, Fp8Parameter) or is_heard(linear) or not linear.way(weight)[1]:
                    return False
        return True

    def multiplied(
        self, stack: Stack, x: torch.Tensor, tokens: torch.Tensor, of_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, out] of the experts' tokens [T, in], expert by expert, by the matrices of a stack, and its biases.

        Args:
            tokens: of each expert, int [experts] on the CPU.
            of_rows: each row's expert, int [T], where there are biases.
        """
        linears, weights = self.fp8_linears(stack), self._weights(stack)
        device = weights[0].device
        runs = [linear.way(weight) for linear, weight in zip(linears, weights, strict=True)]
        joins = [fp8 and not is_heard(linear) for linear, (_, fp8, _) in zip(linears, runs, strict=True)]

        def alone(e: int, part: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = linears[e](part, weights[e])
            return y

        def together(these: list[int], part: torch.Tensor, numbers: Tokens) -> torch.Tensor:
            sites = [runs[e][0] for e in these]
            if autocasts(device):
                part = part.to(torch.get_autocast_dtype(device.type))
            with without_autocast(device):
                return grouped_linear(
                    part,
                    [linears[e].as_matrix(weights[e]) for e in these],
                    numbers,
                    sites,
                    training=self.training,
                )

        y = some_together(x, tokens, joins, together, alone)
        if stack.bias is None:
            return y
        assert of_rows is not None, "biases are added by row"
        return y + getattr(self, stack.bias).index_select(0, of_rows)  # as the plain forward adds it

    def _weights(self, stack: Stack) -> list[Any]:
        """Each expert's matrix, as the stack has it."""
        linears = self.fp8_linears(stack)
        if "weight" in linears[0]._parameters:  # inference took the stack apart
            return [linear.weight for linear in linears]
        whole = getattr(self, stack.parameter)
        if type(whole) is not torch.nn.Parameter:
            check_weight(f"{self.fp8_name}.{stack.parameter}", whole, True)
        return list(whole.unbind(0))

    # ---------------------------------------------------------------------------------------------------------- inference

    def take_apart(self) -> None:
        """After weights of the linears became codes: those of others are copies of their own, and stacks are freed."""
        for stack in self.fp8_stacks:
            linears = self.fp8_linears(stack)
            if stack.parameter not in self._parameters or not any("weight" in x._parameters for x in linears):
                continue
            for linear in linears:
                if "weight" not in linear._parameters:
                    plain = torch.nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
                    linear._parameters["weight"] = plain
            del self._parameters[stack.parameter]

    def _taken_apart(self) -> list[Stack]:
        return [stack for stack in self.fp8_stacks if "weight" in self.fp8_linears(stack)[0]._parameters]

    def _whole(self, stack: Stack) -> torch.Tensor:
        """A stack that was taken apart, dequantised."""
        found = []
        for linear in self.fp8_linears(stack):
            weight = linear.weight.detach()
            coded = isinstance(weight, Fp8Parameter)
            found.append(linear.laid_out(weight.dequantize()) if coded else weight)
        return torch.stack(found)

    def _stack_again(self) -> None:
        for stack in self._taken_apart():
            self._parameters[stack.parameter] = torch.nn.Parameter(self._whole(stack), requires_grad=False)

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """The keys and shapes of the unconverted module; what lives as codes is dequantised."""
        found = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        for stack in self._taken_apart():
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
        for stack in self._taken_apart():
            if (whole := state_dict.pop(f"{prefix}{stack.parameter}", None)) is not None:
                for number, linear in enumerate(self.fp8_linears(stack)):
                    matrix = (
                        linear.as_matrix(whole[number])
                        if isinstance(linear.weight, Fp8Parameter)
                        else whole[number]
                    )
                    state_dict[f"{prefix}{number}.{stack.label}.weight"] = matrix
        super()._load_from_state_dict(state_dict, prefix, *args)


_classes: dict[type[torch.nn.Module], type[Fp8Experts]] = {}  # plain class -> that of its converted modules


def fp8_experts_class(plain_class: type[torch.nn.Module]) -> type[Fp8Experts] | None:
    """The class of converted modules of this class; None if it is of no kind that is known."""
    if plain_class not in _classes:
        kind = kind_of(plain_class)
        if kind is None:
            return None
        members = {"plain_class": plain_class, "kind": kind, "__doc__": Fp8Experts.__doc__}
        _classes[plain_class] = type(f"Fp8{plain_class.__name__}", (Fp8Experts, plain_class), members)
    return _classes[plain_class]


def _empty(plain_class: type[torch.nn.Module]) -> Any:
    """A converted module without its state, for copies and pickles."""
    in_fp8 = fp8_experts_class(plain_class)
    assert in_fp8 is not None
    return in_fp8.__new__(in_fp8)


def count_of(module: torch.nn.Module, stacks: tuple[Stack, ...]) -> int:
    """How many experts a module has."""
    return len(getattr(module, stacks[0].parameter))


def site_name(name: str, number: int, stack: Stack) -> str:
    """What the site of an expert's linear is called, ``name`` being the module's."""
    return ".".join(filter(None, [name, str(number), stack.label]))


def also_called(name: str, stack: Stack) -> tuple[str, ...]:
    """What overrides by name may call it besides: the module, and the parameter, of which it is a part."""
    return tuple(filter(None, [name, ".".join(filter(None, [name, stack.parameter]))]))


def is_heard(linear: torch.nn.Module) -> bool:
    """Whether somebody listens to calls of this very linear, so that it has to be called by itself."""
    return bool(
        linear._forward_hooks
        or linear._forward_pre_hooks
        or linear._backward_hooks
        or linear._backward_pre_hooks
    )
