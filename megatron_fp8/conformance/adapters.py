"""Adapters: how each library quantizes a case, in its own calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

from ..backends.emulated import quantize
from ..backends.native.placement import swizzle
from ..kernels.cast_dispatch import cast
from ..numerics import nvfp4
from ..numerics.formats import E2M1, E4M3, E5M2
from ..numerics.rule import Granularity, Rule
from .golden import Case

Found = Mapping[str, torch.Tensor] | None
"""The tensors of a case by name; None: the library has no such rule."""

Adapter = Callable[[Case], Found]

_FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, E2M1)}


def of_megatron_fp8(case: Case) -> Found:
    """This package's."""
    fmt = _FORMATS[case.fmt]
    if case.block is None:
        codes = nvfp4.pack(nvfp4.encode(case.x)) if fmt is E2M1 else cast(case.x, None, fmt)
        return {"codes": codes}
    rule = Rule(fmt, Granularity(*case.block), case.scale, hadamard=case.hadamard)  # type: ignore[arg-type]
    if case.random_bytes is not None:
        return _stochastic(case)
    if case.hadamard:
        side = quantize(case.x.t(), rule, "columnwise").tensor.columnwise
    else:
        side = quantize(case.x, rule, "rowwise").tensor.rowwise
    assert side is not None
    scale = swizzle(side.scale_inv) if case.tiled else side.scale_inv
    found = {"codes": side.codes, "scale_inv": scale.reshape(case.expected["scale_inv"].shape)}
    return found if side.tensor_amax is None else {**found, "amax": side.tensor_amax}


def _stochastic(case: Case) -> Found:
    """With the case's bytes in the place of Philox's."""
    x = nvfp4.hadamard(case.x) if case.hadamard else case.x
    blocks = nvfp4.pad(x.float()).unflatten(1, (-1, nvfp4.BLOCK)).abs().amax(2)
    amax = blocks.amax()
    scales = nvfp4.block_scales(blocks, amax)
    factors = nvfp4.encoding_factors(scales, amax).repeat_interleave(nvfp4.BLOCK, 1)
    assert case.random_bytes is not None
    codes = nvfp4.encode(nvfp4.pad(x.float()) * factors, case.random_bytes)
    return {"codes": nvfp4.pack(codes), "scale_inv": scales, "amax": amax}


def of_torch(case: Case) -> Found:
    """torch's own conversions, which saturate from 2.12 on."""
    if case.block is not None or case.fmt == "e2m1":
        return None
    return {"codes": case.x.to(_FORMATS[case.fmt].dtype)}


def of_ml_dtypes(case: Case) -> Found:
    """ml_dtypes' conversions, of values clamped before."""
    if case.block is not None:
        return None
    ml_dtypes = importlib.import_module("ml_dtypes")
    name = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e2m1": "float4_e2m1fn"}[case.fmt]
    largest = _FORMATS[case.fmt].max
    array: Any = case.x.float().clamp(-largest, largest).numpy().astype(getattr(ml_dtypes, name))
    codes = torch.from_numpy(array.view("uint8").copy())
    return {"codes": nvfp4.pack(codes) if case.fmt == "e2m1" else codes}


def of_torchao(case: Case) -> Found:
    """torchao's float8, MX (round-up mode) and NVFP4 quantizers."""
    if case.block is None or case.random_bytes is not None or case.hadamard:
        return None
    x, dtype = case.x.contiguous(), _FORMATS[case.fmt].dtype
    if case.scale in ("fp32", "pow2") and case.block in ((0, 0), (1, 0)):
        utils = importlib.import_module("torchao.float8.float8_utils")
        granularity = importlib.import_module("torchao.float8.config").ScalingGranularity
        by_row = case.block == (1, 0)
        options = {"scaling_granularity": granularity.AXISWISE, "axiswise_dim": -1} if by_row else {}
        scale = utils.tensor_to_scale(x, dtype, round_scales_to_power_of_2=case.scale == "pow2", **options)
        codes = utils.to_fp8_saturated(x.float() * scale, dtype)
        return {"codes": codes, "scale_inv": (1 / scale).reshape(case.expected["scale_inv"].shape)}
    if case.scale == "e8m0" and x.shape[1] % 32 == 0:
        module = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
        modes = importlib.import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode
        scale, codes = module.to_mx(x, dtype, 32, modes.RCEIL)
        scale = _in_torchaos_tiles(scale) if case.tiled else scale
        return {"codes": codes, "scale_inv": scale.reshape(case.expected["scale_inv"].shape)}
    if case.scale == "e4m3" and case.block == (1, 16) and x.shape[1] % 16 == 0:
        module = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
        amax = x.abs().max().float()
        scale, codes = module.nvfp4_quantize(x, 16, module.per_tensor_amax_to_scale(amax))
        scale = _in_torchaos_tiles(scale) if case.tiled else scale
        return {"codes": codes, "scale_inv": scale.reshape(case.expected["scale_inv"].shape), "amax": amax}
    return None


def _in_torchaos_tiles(scale: torch.Tensor) -> torch.Tensor:
    to_blocked = importlib.import_module("torchao.prototype.mx_formats.utils").to_blocked
    tiles: torch.Tensor = to_blocked(scale.view(torch.uint8))
    return tiles


def of_microxcaling(case: Case) -> Found:
    """microxcaling's MX quantizer. It returns values: their codes and the blocks' exponents follow from them."""
    if case.scale != "e8m0" or case.x.shape[1] % 32 or case.tiled:
        return None
    ops, formats = importlib.import_module("mx.mx_ops"), importlib.import_module("mx.formats")
    name, x = f"fp8_{case.fmt}", case.x.float()
    values = ops._quantize_mx(x, 8, name, axes=[1], block_size=32, round="even")
    largest = formats._get_format_params(name)[2]
    shared = ops._shared_exponents(x.unflatten(1, (-1, 32)), axes=[2]).squeeze(2) - largest
    exponents = shared.clamp(min=-127)
    scale = torch.exp2(exponents.double()).repeat_interleave(32, 1)
    codes = (values.double() / scale).to(torch.float32).to(_FORMATS[case.fmt].dtype)
    return {"codes": codes, "scale_inv": (exponents + 127).nan_to_num(255).to(torch.uint8)}


def of_transformer_engine(case: Case) -> Found:
    """Transformer Engine's quantizers, on a GPU. Tests fill the real buffers of 2.20.2; its casts were not run."""
    (rows, cols), block = case.x.shape, case.block
    if block is None or case.random_bytes is not None or case.tiled or rows % 16 or cols % 32:
        return None
    tensors = importlib.import_module("transformer_engine.pytorch.tensor")
    dtype = getattr(importlib.import_module("transformer_engine_torch").DType, _TE_DTYPES[case.fmt])
    x, wise = case.x.cuda(), {"rowwise": True, "columnwise": False}
    power = {"force_pow_2_scales": case.scale == "pow2"}
    shape = case.expected["scale_inv"].shape
    if block == (0, 0):
        made = tensors.Float8CurrentScalingQuantizer(dtype, x.device, **wise, **power)(x)
        return {"codes": made._data, "scale_inv": made._scale_inv.reshape(shape)}
    if block[1] == 128:
        dims = 2 if block[0] == 128 else 1
        made = tensors.Float8BlockQuantizer(dtype, **wise, **power, block_scaling_dim=dims)(x)
        scales = made._rowwise_scale_inv if dims == 2 else made._rowwise_scale_inv.t()
        return {"codes": made._rowwise_data, "scale_inv": scales[: shape[0], : shape[1]]}
    if case.scale == "e8m0":
        whole = torch.nn.functional.pad(x, (0, 0, 0, -rows % 32))  # it takes whole blocks in both directions
        made = tensors.MXFP8Quantizer(dtype, **wise)(whole)
        return {
            "codes": made._rowwise_data[:rows],
            "scale_inv": made._rowwise_scale_inv[: shape[0], : shape[1]],
        }
    if case.scale == "e4m3" and not case.hadamard:
        made = tensors.NVFP4Quantizer(dtype, **wise, with_2d_quantization=block == (16, 16))(x.bfloat16())
        scales = made._rowwise_scale_inv[: shape[0], : shape[1]]
        return {"codes": made._rowwise_data, "scale_inv": scales, "amax": made._amax_rowwise.reshape(())}
    if case.scale == "e4m3":
        options = {"rowwise": False, "columnwise": True, "with_rht": True, "with_post_rht_amax": True}
        made = tensors.NVFP4Quantizer(dtype, **options)(x.t().contiguous().bfloat16())
        scales = made._columnwise_scale_inv[: shape[0], : shape[1]]
        return {
            "codes": made._columnwise_data,
            "scale_inv": scales,
            "amax": made._amax_columnwise.reshape(()),
        }
    return None


_TE_DTYPES = {"e4m3": "kFloat8E4M3", "e5m2": "kFloat8E5M2", "e2m1": "kFloat4E2M1"}

LIBRARIES: dict[str, Adapter] = {
    "megatron_fp8": of_megatron_fp8,
    "torch": of_torch,
    "ml_dtypes": of_ml_dtypes,
    "torchao": of_torchao,
    "mx": of_microxcaling,
    "transformer_engine": of_transformer_engine,
}
"""Adapters by the name under which their package is imported."""


def installed_adapters() -> dict[str, Adapter]:
    """The adapters whose packages are installed; Transformer Engine's where there is a GPU."""
    here = {name: adapter for name, adapter in LIBRARIES.items() if find_spec(name) is not None}
    if not torch.cuda.is_available():
        here.pop("transformer_engine", None)
    return here


def version(name: str) -> str:
    """The installed version of a package, by the name under which it is imported; '' if nothing tells it."""
    found = metadata.packages_distributions().get(name, [])
    return metadata.version(found[0]) if found else ""
