"""Linears alone, with weights that come from memory: FP8 against BF16, torchao and ggml. A part of inference.py.

LAYERS linears (24 of 2048 x 5632, or ``--size``) are multiplied one after the other by the same tokens, so a weight was
long gone from the caches when its turn comes again. Contenders take turns.

* torch BF16: ``torch.nn.Linear``.
* this package: the same linears converted and prepared, activations quantized too.
* torchao's FP8 and int8 weights, as ``quantize_`` leaves them for eager code; and the ATen kernel for int8 weights that
  compiled code of torchao calls (``torch._weight_int8pack_mm``). For FP8 torchao has no kernel on CPUs: each call
  dequantizes the weight, which takes some twenty times as long as BF16's product of one token.
* ggml: Q8_0, the 8-bit format of llama.cpp, if a build of ggml is named (``--ggml``).

A contender leaves after ``LONGEST`` seconds, with ``LEAST`` rounds at least: all rounds of the slowest took minutes.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import io
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Timing

N, K, LAYERS = 5632, 2048, 24
TOKENS = (1, 8, 256)
LONGEST, LEAST = 8.0, 3
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")
FARTHEST, FARTHEST_NVFP4 = 0.06, 0.2
"""Root mean square error of 8-bit (4-bit) weights and activations, over that of the result. Measured: 0.01 to 0.04."""

Run = Callable[[torch.Tensor], Any]


def make() -> dict[str, Run]:
    """Contender -> what computes all layers' products of x [M, K], through the gate. The last result is returned."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(K, N, bias=False).to(torch.bfloat16) for _ in range(LAYERS))
    found: dict[str, Run] = {"torch BF16": partial(_each, layers)}
    found |= {f"FP8 {recipe}": partial(_each, _fp8(layers, recipe)) for recipe in RECIPES}
    found |= _torchao(layers)
    packed = [_int8(weight) for weight in layers.parameters()]
    found["ATen int8 weights"] = lambda x: [torch._weight_int8pack_mm(x, *one) for one in packed][-1]
    with torch.no_grad():
        for tokens in TOKENS[:2]:
            x = activations(tokens)
            exact = x.double() @ list(layers.parameters())[-1].double().t()
            for name, run in found.items():
                _check(name, run(x), exact)
    return found


def in_turns(
    contenders: Mapping[str, Callable[[], Any]], repetitions: int, clock: Callable[[], float]
) -> dict[str, Timing]:
    """Each contender once a round, after a warm-up; the slow ones in the first rounds only."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for _ in range(repetitions):
        for name, run in contenders.items():
            taken = seconds[name]
            if len(taken) >= LEAST and sum(taken) >= LONGEST:
                continue
            start = clock()
            run()
            taken.append(clock() - start)
    return {name: Timing(tuple(taken)) for name, taken in seconds.items()}


def activations(tokens: int) -> torch.Tensor:
    """bfloat16 [tokens, K], the same every time."""
    return torch.randn(tokens, K, generator=torch.Generator().manual_seed(tokens)).bfloat16()


def _each(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        y = layer(x)
    return y


def _check(name: str, found: torch.Tensor, exact: torch.Tensor) -> None:
    error = float((found.double() - exact).norm() / exact.norm())
    assert error < (FARTHEST_NVFP4 if "nvfp4" in name else FARTHEST), (
        f"{name}: {error} from the exact product"
    )


def _fp8(layers: torch.nn.ModuleList, recipe: str) -> torch.nn.ModuleList:
    """The layers prepared for inference; with the training forward's bytes."""
    from megatron_fp8.inference import prepare_for_inference
    from megatron_fp8.nn import convert_to_fp8

    with contextlib.redirect_stdout(io.StringIO()):  # a line for each layer
        model = convert_to_fp8(copy.deepcopy(layers), recipe)
    trained = [_each(model, activations(tokens)).detach() for tokens in TOKENS]
    prepare_for_inference(model)
    with torch.no_grad():
        for tokens, before in zip(TOKENS, trained, strict=True):
            assert torch.equal(_each(model, activations(tokens)), before), f"{recipe}: not training's bytes"
    return model


def _torchao(layers: torch.nn.ModuleList) -> dict[str, Run]:
    """Those of torchao's weight-only models that run on a CPU; what does not is told."""
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError:
        print("torchao is not installed")
        return {}
    found: dict[str, Run] = {}
    for name, config in (("FP8", Float8WeightOnlyConfig), ("int8", Int8WeightOnlyConfig)):
        model = torch.nn.Sequential(*copy.deepcopy(layers))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                quantize_(model, config())
                model[-1](activations(1))
        except Exception as error:  # whatever a peer raises is its answer
            print(f"torchao {name} weights do not run here: {error}")
            continue
        found[f"torchao {name} weights"] = partial(_each, model)
    return found


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [N, K], bfloat16 [N]), symmetric for each row."""
    scale = weight.detach().float().abs().amax(1) / 127
    return (weight.detach().float() / scale[:, None]).round().to(torch.int8), scale.bfloat16()


# ------------------------------------------------------------------------------------------------------------- ggml

_F32, _Q8_0 = 0, 8


class _Parameters(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """Products by Q8_0 weights of a build of ggml: one graph with all layers for each number of tokens.

    Args:
        folder: where its shared libraries are, or above them.
        threads: to compute with.
    """

    def __init__(self, folder: Path, threads: int):
        self._threads = threads
        self._ggml = {
            name: ctypes.CDLL(str(sorted(folder.rglob(f"lib{name}.so"))[0]), mode=ctypes.RTLD_GLOBAL)
            for name in ("ggml-base", "ggml-cpu")
        }
        for name in ("ggml_init", "ggml_new_tensor_2d", "ggml_mul_mat", "ggml_new_graph", "ggml_get_data"):
            self._function(name).restype = ctypes.c_void_p
        torch.manual_seed(0)
        weights = [
            torch.nn.Linear(K, N, bias=False).to(torch.bfloat16).weight.detach() for _ in range(LAYERS)
        ]
        self._last = weights[-1]
        self._graphs = {tokens: self._graph(weights, tokens) for tokens in TOKENS}

    def _function(self, name: str) -> Any:
        return next(getattr(lib, name) for lib in self._ggml.values() if hasattr(lib, name))

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._function(name)(*arguments)

    def _graph(self, weights: list[torch.Tensor], tokens: int) -> tuple[Any, Any, Any]:
        size = LAYERS * (N * K * 9 // 8 + tokens * N * 4) + tokens * (K + N) * 16 + 2**26
        context = ctypes.c_void_p(self._call("ggml_init", _Parameters(size, None, False)))
        x = self._tensor(context, _F32, K, tokens)
        values = activations(tokens).float().contiguous()
        ctypes.memmove(self._data(x), values.data_ptr(), values.numel() * 4)
        graph = ctypes.c_void_p(self._call("ggml_new_graph", context))
        for weight in weights:
            codes, plain = self._tensor(context, _Q8_0, K, N), weight.float().contiguous()
            self._call(
                "ggml_quantize_chunk",
                ctypes.c_int(_Q8_0),
                ctypes.c_void_p(plain.data_ptr()),
                ctypes.c_void_p(self._data(codes)),
                *map(ctypes.c_int64, (0, N, K)),
                None,
            )
            y = ctypes.c_void_p(self._call("ggml_mul_mat", context, codes, x))
            self._call("ggml_build_forward_expand", graph, y)
        found = context, graph, y
        self._compute(found)
        result = torch.frombuffer(
            (ctypes.c_float * (tokens * N)).from_address(self._data(y)), dtype=torch.float32
        )
        exact = activations(tokens).double() @ self._last.double().t()
        _check("ggml Q8_0", result.view(tokens, N), exact)
        return found

    def _tensor(self, context: Any, kind: int, inner: int, outer: int) -> Any:
        sizes = map(ctypes.c_int64, (inner, outer))
        return ctypes.c_void_p(self._call("ggml_new_tensor_2d", context, ctypes.c_int(kind), *sizes))

    def _data(self, tensor: Any) -> int:
        return int(self._call("ggml_get_data", tensor))

    def _compute(self, graph: tuple[Any, Any, Any]) -> None:
        status = self._call("ggml_graph_compute_with_ctx", graph[0], graph[1], ctypes.c_int(self._threads))
        assert status == 0, f"ggml: status {status}"

    def __call__(self, x: torch.Tensor) -> None:
        """All layers' products of ``activations`` of as many tokens as x has."""
        self._compute(self._graphs[len(x)])
