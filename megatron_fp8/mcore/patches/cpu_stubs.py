"""CPU replacements for torch.cuda functions that Megatron-Core calls: streams, events, devices, RNG state.

A CPU runs operations in program order, so a stream is only a name, and waiting for one does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

CPU = torch.device("cpu")


class CpuEvent:
    """An event on a device that runs in program order: complete as soon as it is recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self._timed, self._recorded = enable_timing, float("nan")

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
        """Milliseconds from this event to ``end_event``.

        Raises ValueError, as torch.cuda.Event does, if one of them was not recorded or made without enable_timing.
        """
        elapsed = 1e3 * (end_event._recorded - self._recorded)
        if not (self._timed and end_event._timed) or math.isnan(elapsed):
            raise ValueError("elapsed_time() needs two recorded events made with enable_timing=True")
        return elapsed


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


def tensor_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`tensor.cuda()` returns the tensor itself, as on a GPU for a tensor that is already there."""
    return self


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


def tensor_pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns the tensor itself: pinning needs CUDA's driver, and serves copies to a GPU."""
    return self


def cpu_device_context(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps DeviceContext.__init__: torch.device("cuda") and set_default_device("cuda") make tensors on the CPU."""

    @functools.wraps(original)
    def __init__(self: Any, device: Any) -> None:
        original(self, CPU if names_cuda(device) else device)

    return __init__


def no_range(original: Callable[..., Any]) -> Callable[..., int]:
    """Wraps a function of torch.cuda.nvtx: it does nothing and returns 0 as depth or handle."""

    @functools.wraps(original)
    def mark(*args: Any, **kwargs: Any) -> int:
        return 0

    return mark


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


def gather_as_bytes(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an all-gather: passes both tensors as uint8.

    gloo coalesces the gathers of one bucket group and sends all of them in the first one's dtype: after a uint8 (FP8)
    buffer, a BF16 buffer arrives with its values silently cast to bytes. With uint8 views nothing is cast.
    """

    @functools.wraps(gather)
    def gather_bytes(output: torch.Tensor, shard: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return gather(output.view(torch.uint8), shard.view(torch.uint8), *args, **kwargs)

    return gather_bytes


def stay_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replaces moe_utils.maybe_move_tensor_to_cpu for a CPU tensor: only the conversion to numpy remains."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
