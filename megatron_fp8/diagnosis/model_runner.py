"""Runs repeatable passes of a model for diagnosis: one PyTorch model, one process.

Each pass of a batch starts with the same random state and buffers, and leaves no trace: gradients come from
torch.autograd.grad and are never accumulated, so no hooks on accumulation run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..files.argument_check import check_model
from ..linear.gemm_site import GemmSite
from ..params.fp8_parameter import Fp8Parameter
from ..plan.site_plan import SitePlan

Gradients = dict[str, torch.Tensor]

Table = dict[str, tuple[float, ...]]
"""Parameter -> sums over its elements."""


@dataclass
class Pass:
    """Result of one forward and backward: the loss, the gradients by parameter (detached), and the number of FP8
    GEMMs."""

    loss: float
    gradients: Gradients
    fp8_gemms: int


class ModelRunner(Protocol):
    """A model with its loss and batches.

    Attributes:
        sites: this rank's GEMM sites with FP8, by name.
        plans: plans of the sites on all ranks.
        batches: number of batches.
    """

    @property
    def sites(self) -> Mapping[str, GemmSite]: ...
    @property
    def plans(self) -> Mapping[str, SitePlan]: ...
    @property
    def batches(self) -> int: ...

    def run(self, batch: int) -> Pass:
        """Forward and backward of a batch; repeatable."""

    def merge(self, table: Table) -> Table:
        """Merges this rank's table with all others', each element once; the same on all ranks. Collective."""

    def not_finite(self) -> Table:
        """Parameter -> number of NaN and Inf values, if any; the same on all ranks. Collective."""

    def update_of(self, name: str, gradient: torch.Tensor, norm: float) -> torch.Tensor | None:
        """The optimizer's change of a parameter by this gradient, which is part of a gradient with that norm; None if
        unknown."""


class ModuleRunner:
    """A model in this process.

    Args:
        model: its layers have an ``fp8_site``; may be wrapped by DistributedDataParallel or torch.compile.
        loss_of: (model, batch) -> the loss, a scalar tensor.
        batches: arguments for ``loss_of``.
        optimizer: Adam-like; its update is examined. Other optimizers are ignored.

    Raises ValueError: the model has no FP8 site, or none with a plan that can change; too few batches.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_of: Callable[[Any, Any], torch.Tensor],
        batches: Sequence[Any],
        optimizer: torch.optim.Optimizer | None = None,
    ):
        check_model(model)
        self.model, self._loss_of, self._batches = unwrap(model), loss_of, list(batches)
        self.batches = len(self._batches)
        self.sites = sites_of(self.model)
        self.plans = {name: site.plan for name, site in self.sites.items()}
        self._parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        _check_parameters(self._parameters)
        self._random: dict[int, _Random] = {}
        self._buffers = _Buffers(self.model)
        self._adam = {} if optimizer is None else _adam_states(optimizer, self._parameters)

    def run(self, batch: int) -> Pass:
        """As ModelRunner.run. Raises ValueError if the loss is not a scalar that depends on a parameter."""
        self._buffers.put_back()
        if batch in self._random:
            self._random[batch].put_back()
        else:
            self._random[batch] = _Random()
        states = {id(site.state): site.state for site in self.sites.values()}
        before = sum(state.counts.fp8_gemms for state in states.values())
        with torch.enable_grad(), _check_unchanged(self._parameters):
            loss = self._loss_of(self.model, self._batches[batch])
        if (
            not isinstance(loss, torch.Tensor)
            or loss.numel() != 1
            or not loss.requires_grad
            or loss.is_complex()
        ):
            message = (
                f"a tensor {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            )
            raise ValueError(
                f"loss_of(model, batch) gave {message}: diagnose needs a scalar tensor that depends on parameters which"
                " require a gradient"
            )
        gradients = self._gradients(loss)
        ran = sum(state.counts.fp8_gemms for state in states.values()) - before
        return Pass(float(loss.detach()), gradients, ran)

    def _gradients(self, loss: torch.Tensor) -> Gradients:
        """If wgrad is added to Megatron's ``main_grad`` buffer, the gradient is the amount added."""
        fused = {
            name: (parameter, parameter.main_grad.clone(), parameter.grad_added_to_main_grad)
            for name, parameter in self._parameters.items()
            if hasattr(parameter, "main_grad") and hasattr(parameter, "grad_added_to_main_grad")
        }
        for parameter, _, _ in fused.values():
            parameter.main_grad.zero_()
            parameter.grad_added_to_main_grad = False
        try:
            found = torch.autograd.grad([loss], list(self._parameters.values()), allow_unused=True)
            gradients = {n: g for n, g in zip(self._parameters, found, strict=True) if g is not None}
            for name, (parameter, _, _) in fused.items():
                if parameter.grad_added_to_main_grad:
                    gradients[name] = parameter.main_grad.clone()
        finally:
            for parameter, before, added in fused.values():
                parameter.main_grad.copy_(before)
                parameter.grad_added_to_main_grad = added
        return gradients

    def merge(self, table: Table) -> Table:
        """Returns the table: one process has everything."""
        return table

    def not_finite(self) -> Table:
        """As ModelRunner.not_finite."""
        return not_finite(self._parameters)

    def update_of(self, name: str, gradient: torch.Tensor, norm: float) -> torch.Tensor | None:
        """Adam's step with its current moments. Gradient clipping is not modelled."""
        adam = self._adam.get(id(self._parameters[name]))
        return None if adam is None else adam_update(gradient, *adam)


def not_finite(parameters: Mapping[str, torch.nn.Parameter]) -> Table:
    """Name -> number of NaN and Inf values of a parameter, if any."""
    counts = {name: (~p.detach().to(torch.float32).isfinite()).sum().item() for name, p in parameters.items()}
    return {name: (float(count),) for name, count in counts.items() if count}


def unwrap(model: torch.nn.Module) -> Any:
    """The model without wrappers of DistributedDataParallel and torch.compile."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    return getattr(model, "_orig_mod", model)


def sites_of(model: torch.nn.Module) -> dict[str, GemmSite]:
    """Name -> site of the layers with FP8 GEMMs. Raises ValueError if there are none, or if one is not a GemmSite."""
    found: dict[str, GemmSite] = {}
    for name, module in model.named_modules():
        if not hasattr(type(module), "fp8_site"):
            continue
        site: Any = module.fp8_site
        if not isinstance(site, GemmSite):
            raise ValueError(
                f"{name} is a layer of backend {site.plan.backend!r}, which has its own GEMMs: diagnose a model on the"
                " emulated or native backend"
            )
        if isinstance(module._parameters.get("weight"), Fp8Parameter):
            raise ValueError(
                f"{name}: its weight is an FP8 parameter without high-precision values: diagnose a model whose"
                " weights are not FP8 (fp8_param=False, no enable_fp8_all_gather)"
            )
        if site.is_fp8:
            found[name if site.plan.name in found else site.plan.name] = site
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layer with FP8 GEMMs: convert_to_fp8(model) comes first"
        )
    return found


def _check_parameters(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    if torch.is_inference_mode_enabled():
        raise ValueError("under torch.inference_mode there are no gradients: call diagnose outside of it")
    if not parameters:
        raise ValueError("no parameter of the model requires a gradient: there is nothing to diagnose")
    for name, parameter in parameters.items():
        if hasattr(parameter, "to_local"):
            raise ValueError(
                f"{name} is sharded by fully_shard: diagnose the model before it is sharded, in one process"
            )


@contextmanager
def _check_unchanged(parameters: Mapping[str, torch.nn.Parameter]) -> Iterator[None]:
    """Raises ValueError if the body writes to a parameter or its gradient: passes could not be compared."""

    def written() -> dict[str, tuple[Any, ...]]:
        return {
            name: (p._version, id(p.grad), None if p.grad is None else p.grad._version)
            for name, p in parameters.items()
        }

    before = written()
    yield
    for name, value in written().items():
        if value != before[name]:
            raise ValueError(
                f"loss_of(model, batch) changed {name} or its gradient: give a function that only computes the loss,"
                " without backward() and optimizer.step(). The change stays: load the model anew"
            )


# --------------------------------------------------------------------------------------------------- restoring state


@contextmanager
def restore_after(model: Any, sites: Mapping[str, GemmSite]) -> Iterator[None]:
    """Context: puts the model into training mode and restores it afterwards, bit for bit, with the random
    state.

    Restores buffers, modes, numbers and flags of modules, amaxes, counts and observers. A model already in
    training mode keeps its modules' modes (frozen parts stay so). torch.compile is off, since compiled code
    has one fixed plan.
    """
    modules = list(model.modules())
    modes = [module.training for module in modules]
    plain = [{k: v for k, v in vars(module).items() if _is_plain(v)} for module in modules]
    buffers = _Buffers(model)
    rng = _Random()
    with ExitStack() as stack:
        for state in {id(site.state): site.state for site in sites.values()}.values():
            stack.enter_context(state.unrecorded())
        stack.enter_context(_eager_mode())
        try:
            if not model.training:
                model.train()
            yield
        finally:
            for module, mode, values in zip(modules, modes, plain, strict=True):
                module.training = mode
                for name, value in values.items():
                    if name not in vars(module) or vars(module)[name] is not value:
                        setattr(module, name, value)
            buffers.put_back()
            rng.put_back()


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _eager_mode() -> Any:
    """Switches torch.compile off, if it has been used."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class _Buffers:
    """A model's buffers, including missing ones: a forward may write to a buffer or replace it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._of = [
            (
                module,
                [(name, b, None if b is None else b.detach().clone()) for name, b in module._buffers.items()],
            )
            for module in model.modules()
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        for module, buffers in self._of:
            for name, buffer, values in buffers:
                if buffer is not None and values is not None:
                    buffer.copy_(values)
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer


class _Random:
    """The random state of torch on every device, of Python and of NumPy."""

    def __init__(self) -> None:
        self._cpu, self._python = torch.get_rng_state(), random.getstate()
        self._gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        numpy: Any = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def put_back(self) -> None:
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        if self._gpus is not None:
            torch.cuda.set_rng_state_all(self._gpus)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


# ------------------------------------------------------------------------------------------------------ the optimizer


def _adam_states(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """Parameter id -> (state, group settings), for parameters with Adam's moments. Raises ValueError if the optimizer
    is another model's."""
    known = {id(parameter) for parameter in parameters.values()}
    if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"optimizer={type(optimizer).__name__} holds none of the model's parameters: give the optimizer that trains"
            " this model, or leave it out"
        )
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "exp_avg" in state and "exp_avg_sq" in state and "betas" in group:
                found[id(parameter)] = (state, group)
    return found


def adam_update(gradient: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> torch.Tensor:
    """Adam's next update for this gradient, float32, without weight decay, in units of the learning rate (arXiv
    1412.6980). Does not change the state."""
    beta1, beta2 = group["betas"]
    g = gradient.to(torch.float32)
    step = float(state.get("step", group.get("step", 0))) + 1
    first = state["exp_avg"].to(torch.float32).lerp(g, 1 - beta1) / (1 - beta1**step)
    second = (state["exp_avg_sq"].to(torch.float32) * beta2 + g * g * (1 - beta2)) / (1 - beta2**step)
    return first / (second.sqrt() + group["eps"])
