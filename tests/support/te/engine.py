"""The real Transformer Engine on a machine without a GPU: its wheel's Python, beside a stub of its compiled extension.

The stub's names are made when they are read: enums, and functions that raise, since each would compute on a GPU. In the
engine's own modules ``torch`` says that there is a GPU, and makes on the CPU what is asked for on it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch

OLDEST, NEWEST = "2.9.0", "2.20.2"
"""The versions that are tested: the oldest that is accepted, and the newest that was looked at."""

# The enums whose members are places in lists, in the order of the extension's headers.
PLACES = {
    "FP8FwdTensors": [f"GEMM{n}_{what}" for n in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")],
    "FP8BwdTensors": [f"GRAD_{what}{n}" for n in (1, 2, 3) for what in ("OUTPUT", "INPUT")],
}


def download(version: str, folder: Path) -> str | None:
    """Installs the wheel alone into a folder; returns why it could not be fetched, None if it was."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries=1"]
    wanted = ["--no-deps", f"--target={folder}", f"transformer-engine=={version}"]
    done = subprocess.run([*pip, *wanted], capture_output=True, text=True, timeout=120)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


class _Member(int):
    name: str


class _Enum(type):
    """The class of an enum whose members are numbered as they are first read."""

    def __init__(cls, name: str, *_: Any) -> None:
        cls.__members__: dict[str, _Member] = {}
        for place in PLACES.get(name, ()):
            getattr(cls, place)

    def __getattr__(cls, name: str) -> _Member:
        if name.startswith("__"):
            raise AttributeError(name)
        member = cls.__members__[name] = _Member(len(cls.__members__))
        member.name = name
        setattr(cls, name, member)
        return member


class Stub(types.ModuleType):
    """A compiled module: names with a capital are enums, others functions, none of which computes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            made: Any = _Enum(name, (), {})
        else:

            def made(*args: Any, **kwargs: Any) -> Any:
                raise NotImplementedError(f"{self.__name__}.{name} computes on a GPU")

        setattr(self, name, made)
        return made


class _Device(type):
    """torch.device, for which CUDA is the CPU."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.device)

    def __call__(cls, *args: Any) -> torch.device:
        return torch.device("cpu" if str(args[0]).startswith("cuda") else args[0], *args[1:])


def _torch_with_gpu() -> types.ModuleType:
    """torch, as the engine's modules see it: one Blackwell, whose memory is the CPU's."""

    def over(real: Any, **others: Any) -> types.ModuleType:
        module = types.ModuleType(real.__name__)
        vars(module).update(others, __getattr__=lambda name: getattr(real, name))
        return module

    def factory(name: str) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device")).startswith(("cuda", "0")):
                kwargs["device"] = "cpu"
            return getattr(torch, name)(*args, **kwargs)

        return make

    cuda = over(
        torch.cuda,
        is_available=lambda: True,
        current_device=lambda: 0,
        device=lambda device: contextlib.nullcontext(),
        get_device_capability=lambda device=None: (10, 0),
        get_device_properties=lambda device: types.SimpleNamespace(major=10, minor=0),
        is_current_stream_capturing=lambda: False,
        nvtx=types.SimpleNamespace(range=lambda text: contextlib.nullcontext()),
    )
    made = {
        name: factory(name) for name in ("empty", "empty_like", "zeros", "ones", "ones_like", "eye", "tensor")
    }
    device, version = _Device("device", (), {}), types.SimpleNamespace(cuda="13.0")
    return over(torch, cuda=cuda, version=version, device=device, **made)


def _caller() -> str:
    """The module that reads the property whose getter asks this."""
    return sys._getframe(2).f_globals.get("__name__", "")


def install(folder: str) -> Stub:
    """Imports the engine from a folder, before Megatron-Core looks for it; returns the stub of its extension."""
    assert not any(name.startswith("megatron.") for name in sys.modules), "Megatron-Core has looked already"
    sys.path.insert(0, folder)
    extension = Stub("transformer_engine_torch")
    sys.modules |= {
        stub.__name__: stub for stub in (extension, Stub("transformer_engine.pytorch.onnx_extensions"))
    }
    with mock.patch.dict(os.environ, NVTE_PROJECT_BUILDING="1"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it says that its extension is missing
        common = importlib.import_module("transformer_engine.common")
        common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
        importlib.import_module("transformer_engine.pytorch")
    with_gpu = _torch_with_gpu()
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and vars(module).get("torch") is torch:
            module.torch = with_gpu  # type: ignore[attr-defined]
    torch.Tensor.is_cuda = property(lambda _: _caller().startswith("transformer_engine."))  # type: ignore
    return extension
