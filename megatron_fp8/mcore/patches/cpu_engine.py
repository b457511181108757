"""Patches for training with Megatron-Core on a machine without CUDA, over gloo.

Not a TorchFunctionMode: that is off inside backward() and in other threads. Without each patch, some lines of
Megatron-Core 0.16.1 fail, or silently corrupt data.

A CPU runs operations in program order, so a stream is only a name, and waiting for one does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import time
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._device import _device_constructors

from . import missing_packages
from .patching import Patch, PatchList

CPU = torch.device("cpu")

# Imported before the list is made, so that it includes every function they compile and every name they import.
_MODULES = (
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "optimizer",
    "distributed",
    "pipeline_parallel.schedules",
    "transformer.moe.moe_layer",
    "transformer.moe.token_dispatcher",
)

_cuda, _tensor, _core = PatchList("torch.cuda"), PatchList("torch.Tensor"), PatchList()


@cache  # torch's list of operators takes 20 ms
def factories() -> dict[str, tuple[str, ...]]:
    """Returns module -> names of the functions of this torch version that make tensors on a ``device``."""
    taking_device = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and any(a.name == "device" for a in schema.arguments)
    }
    # From torch's own device context, since asarray has no schema. The call also fills torch's cache: filled after the
    # patches, it would hold the patched functions, and `with torch.device(...)` would do nothing.
    own = {f.__name__ for f in _device_constructors()}
    return {
        "torch": tuple(
            name
            for name in sorted(taking_device | own)
            if not name.startswith("_") and isinstance(getattr(torch, name, None), types.BuiltinFunctionType)
        ),
        "torch.fft": tuple(name for name in ("fftfreq", "rfftfreq") if hasattr(torch.fft, name)),
        "torch.nested": ("nested_tensor", "as_nested_tensor"),
        "torch.Tensor": tuple(sorted(name for name in dir(torch.Tensor) if name.startswith("new_"))),
    }


def patches() -> list[Patch]:
    """Returns all engine patches, for this process's loaded Megatron-Core. Imports Megatron-Core."""
    for module in _MODULES:
        importlib.import_module(f"megatron.core.{module}")
    why = "Megatron-Core makes tensors with device='cuda'"
    make = [
        Patch(owner, name, cpu_factory, why, wrap=True)
        for owner, names in factories().items()
        for name in names
    ]
    return [
        *_cuda,
        *make,
        *_tensor,
        *_utils,
        *_core,
        *missing_packages.without_compiler(),
        *missing_packages.on_cpu(),
    ]


# ------------------------------------------------------------------------------------------- streams and devices


class CpuEvent:
    """An event on a device that runs in program order: complete as soon as it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._recorded = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        """Records the current time: everything before this point has run."""
        self._recorded = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """True: everything recorded has run."""
        return True

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Milliseconds from this event to ``end_event``."""
        return 1e3 * (end_event._recorded - self._recorded)


class CpuStream(contextlib.nullcontext[None]):
    """A stream on a device that runs in program order. `with stream:` changes nothing."""

    device = CPU
    cuda_stream = stream_id = device_index = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any):
        super().__init__()
        self.priority = priority

    def wait_stream(self, stream: Any) -> None:
        """Does nothing."""

    def wait_event(self, event: Any) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Records the event, or a new one, and returns it."""
        event = event or CpuEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        """True: nothing is queued."""
        return True


_DEFAULT_STREAM = CpuStream()


def current_stream(device: Any = None) -> CpuStream:
    """Returns the CPU's only stream."""
    return _DEFAULT_STREAM


def stream_context(stream: Any) -> contextlib.AbstractContextManager[None]:
    """Returns a context without effect."""
    return contextlib.nullcontext()


def set_stream(stream: Any) -> None:
    """Does nothing: there is one stream."""


def current_device() -> torch.device:
    """Returns the device that Megatron-Core passes as `device=`."""
    return CPU


# Three functions, not one with three names: torch.compile identifies each and treats them differently.


def set_device(device: Any) -> None:
    """Does nothing: there is one CPU."""


def synchronize(device: Any = None) -> None:
    """Does nothing."""


def empty_cache() -> None:
    """Does nothing."""


def names_cuda(device: Any) -> bool:
    """Whether a `device=` argument means CUDA: 'cuda', 'cuda:1', torch.device('cuda'), or a bare index."""
    if device is None or device == "cpu":  # the common case first: a step makes thousands of tensors
        return False
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def cpu_factory(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wraps a tensor factory: 'cuda' becomes the CPU, and pin_memory is ignored."""

    @functools.wraps(make)
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            if names_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)  # pinning needs CUDA's driver
        return make(*args, **kwargs)

    return factory


def tensor_to(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wraps `tensor.to(...)` in all its forms: 'cuda' becomes the CPU; module.to() calls it."""

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and names_cuda(args[0]):
            args = (CPU, *args[1:])
        elif kwargs and names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return to


def itself(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns the tensor itself, as `tensor.cuda()` does on a GPU for a tensor that is already there."""
    return tensor


def on_cpu_device(original: Callable[..., None], self: Any, device: Any) -> None:
    """Replaces DeviceContext.__init__: torch.device("cuda") and set_default_device("cuda") make tensors on the CPU."""
    original(self, CPU if names_cuda(device) else device)


def no_range(original: Any, *args: Any, **kwargs: Any) -> int:
    """Replaces torch.cuda.nvtx's functions: does nothing and returns 0 as depth or handle."""
    return 0


def tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `tensor.type()`: Megatron-Core's optimizer gets 'torch.cuda.FloatTensor' on a CPU too.

    All other callers, and `tensor.type(dtype)`, get PyTorch's own result.
    """

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        if args or kwargs:
            return name
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("megatron.core.optimizer.") and not name.startswith("torch.cuda."):
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    return type_


def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns the CPU generator's state in place of the GPU's; a copy, uint8 [n]."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Sets the CPU generator in place of the GPU's."""
    torch.set_rng_state(new_state)


def manual_seed(seed: int) -> None:
    """Seeds the CPU generator in place of the GPU's."""
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def fork(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """CudaRNGStatesTracker.fork on the CPU generator: runs the body on the random stream called `name`.

    Megatron-Core's own warns if the CPU generator changes inside the body; here that generator is the tracked one.
    Nesting works as in the original: the outer stream continues where the inner body left it.
    """
    if name not in self.states_:
        raise KeyError(f"RNG state {name!r} is not tracked; call model_parallel_cuda_manual_seed() first")
    outer_name, outer_state = self._current_state_name, torch.get_rng_state()
    nested = outer_name != "default-rng"
    if nested:
        self.states_[outer_name] = outer_state
    torch.set_rng_state(self.states_[name])
    self._current_state_name = name
    try:
        yield
    finally:
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(self.states_[outer_name] if nested else outer_state)
        self._current_state_name = outer_name


def gather_as_bytes(
    gather: Callable[..., Any], output: torch.Tensor, shard: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """An all-gather of both tensors as uint8.

    gloo coalesces the gathers of one bucket group and sends all of them in the first one's dtype: after a uint8 (FP8)
    buffer, a BF16 buffer arrives with its values silently cast to bytes. With uint8 views nothing is cast.
    """
    return gather(output.view(torch.uint8), shard.view(torch.uint8), *args, **kwargs)


def stay_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replaces moe_utils.maybe_move_tensor_to_cpu for a CPU tensor: only the conversion to numpy remains."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


# ------------------------------------------------------------------------------------------------------ the patches

_WHY = "Megatron-Core asks torch.cuda, which raises on a machine without CUDA"
_RANDOM = "tensor-parallel random streams are states of the GPU's generator, and dropout and recompute need the CPU's"

for _name, _replacement, _why in (
    ("current_device", current_device, _WHY),
    ("set_device", set_device, _WHY),
    ("synchronize", synchronize, _WHY),
    ("empty_cache", empty_cache, _WHY),
    ("Stream", CpuStream, _WHY),
    ("Event", CpuEvent, _WHY),
    ("current_stream", current_stream, _WHY),
    ("default_stream", current_stream, _WHY),
    ("stream", stream_context, _WHY),
    ("set_stream", set_stream, _WHY),
    ("get_rng_state", get_rng_state, _RANDOM),
    ("set_rng_state", set_rng_state, _RANDOM),
    ("manual_seed", manual_seed, _RANDOM),
):
    _cuda.replace(_name, _replacement, _why)
for _name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
    _cuda.wrap(f"nvtx.{_name}", "a torch without CUDA has no NVTX", everywhere=True)(no_range)
_tensor.replace("cuda", itself, "tied embeddings and checkpoints move tensors to the GPU")
_tensor.replace("pin_memory", itself, "pinning needs CUDA's driver, and serves copies to a GPU")
_tensor.replace("to", tensor_to, "Megatron-Core moves tensors to the GPU", wrap=True)
_tensor.replace("type", tensor_type, "the optimizer sorts parameters by 'torch.cuda.*'", wrap=True)
_utils = PatchList("torch.utils._device")
_utils.wrap("DeviceContext.__init__", "`with torch.device('cuda')` makes tensors on the GPU")(on_cpu_device)
for _name, _state in (("_get_cuda_rng_state", get_rng_state), ("_set_cuda_rng_state", set_rng_state)):
    _core.replace(f"tensor_parallel.random.{_name}", _state, _RANDOM, everywhere=True)
_core.replace("tensor_parallel.random.CudaRNGStatesTracker.fork", fork, _RANDOM)
_core.wrap(
    "distributed.param_and_grad_buffer.dist_all_gather_func",
    "gloo coalesces gathers of different dtypes into the first one's: silent corruption",
)(gather_as_bytes)
_core.replace(
    "transformer.moe.moe_utils.maybe_move_tensor_to_cpu",
    stay_on_cpu,
    "on a CPU tensor it skips the conversion to numpy that the all-to-all's split sizes need",
    everywhere=True,
)
