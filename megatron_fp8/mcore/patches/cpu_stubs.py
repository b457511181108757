"""CPU stand-ins for what Megatron-Core calls in torch.cuda: streams, events, device names, RNG state.

A CPU runs operations in program order, so a stream is a name and waiting for one is nothing.
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
        """Everything before this point has run: the time is now."""
        self._recorded = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

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
    """A stream on a device that runs in program order. `with stream:` runs here, as everything does."""

    device = CPU
    cuda_stream = stream_id = device_index = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any):
        super().__init__()
        self.priority = priority

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """The event, or a new one, recorded here."""
        event = event or CpuEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        """True: nothing is queued."""
        return True


_DEFAULT_STREAM = CpuStream()


def current_stream(device: Any = None) -> CpuStream:
    """The one stream of the CPU."""
    return _DEFAULT_STREAM


def stream_context(stream: Any) -> contextlib.AbstractContextManager[None]:
    """Running on another stream is running here."""
    return contextlib.nullcontext()


def set_stream(stream: Any) -> None:
    """There is one order in which things run."""


def current_device() -> torch.device:
    """What Megatron-Core passes on as `device=`."""
    return CPU


# Three functions, not one under three names: torch.compile knows each by its identity, and treats them differently.


def set_device(device: Any) -> None:
    """There is one CPU."""


def synchronize(device: Any = None) -> None:
    """Nothing to wait for."""


def empty_cache() -> None:
    """Nothing is cached."""


def names_cuda(device: Any) -> bool:
    """Whether a `device=` argument means CUDA: 'cuda', 'cuda:1', torch.device('cuda'), or a bare index."""
    if device is None or device == "cpu":  # nearly always; a step makes thousands of tensors
        return False
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def cpu_factory(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A tensor factory that makes on the CPU what it is asked to make on 'cuda', and pins no memory."""

    @functools.wraps(make)
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            if names_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)  # pinning needs CUDA's driver
        return make(*args, **kwargs)

    return factory


def tensor_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`tensor.cuda()` is the tensor itself, as it is on a GPU for a tensor that already lives there."""
    return self


def tensor_to(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`tensor.to(...)` in all its forms, to the CPU where it says 'cuda'; module.to() goes through it."""

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and names_cuda(args[0]):
            args = (CPU, *args[1:])
        elif kwargs and names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return to


def tensor_pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Pinning needs CUDA's driver, and is for copies to a GPU: the tensor itself."""
    return self


def cpu_device_context(original: Callable[..., None]) -> Callable[..., None]:
    """DeviceContext.__init__: `with torch.device("cuda")` and set_default_device("cuda") make tensors on the CPU."""

    @functools.wraps(original)
    def __init__(self: Any, device: Any) -> None:
        original(self, CPU if names_cuda(device) else device)

    return __init__


def no_range(original: Callable[..., Any]) -> Callable[..., int]:
    """A function of torch.cuda.nvtx that marks nothing: nobody profiles a GPU here. Its depth, or handle, is 0."""

    @functools.wraps(original)
    def mark(*args: Any, **kwargs: Any) -> int:
        return 0

    return mark


def tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """`tensor.type()` as Megatron-Core's optimizer compares it: 'torch.cuda.FloatTensor' on a CPU too.

    Everybody else, and `tensor.type(dtype)`, sees PyTorch's own answer.
    """

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if args or kwargs:
            return answer
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("megatron.core.optimizer.") and not answer.startswith("torch.cuda."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_


def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The CPU generator's state, where Megatron-Core asks for the GPU's; a copy, uint8 [n]."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Sets the CPU generator, where Megatron-Core sets the GPU's."""
    torch.set_rng_state(new_state)


def manual_seed(seed: int) -> None:
    """Seeds the CPU generator, where Megatron-Core seeds the GPU's."""
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def fork(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """CudaRNGStatesTracker.fork on the CPU generator: runs the body on the stream of numbers called `name`.

    Megatron-Core's own warns if the CPU generator moves inside the body; here that generator is the tracked
    one. Nesting works as in the original: the outer stream continues where the body of the inner one left it.
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
    """An all-gather that hands both tensors over as uint8.

    gloo coalesces the gathers of one bucket group and sends them all in the first one's dtype: a uint8 (FP8)
    buffer followed by a BF16 buffer arrives with the BF16 values cast to bytes, and nothing says so. Bytes
    are only bytes.
    """

    @functools.wraps(gather)
    def gather_bytes(output: torch.Tensor, shard: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return gather(output.view(torch.uint8), shard.view(torch.uint8), *args, **kwargs)

    return gather_bytes


def stay_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """moe_utils.maybe_move_tensor_to_cpu for a tensor that is there: only numpy is left to do."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
