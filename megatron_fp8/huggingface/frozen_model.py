"""A model of a quantized directory, with the directory's own codes as frozen weights.

    model = load_frozen("DeepSeek-like-fp8")                # fp8, compressed-tensors or modelopt
    model = get_peft_model(model, LoraConfig(...))

No weight passes through BF16: codes and scales of a file become the parameter's. The recipe follows from the scales:

    scales              recipe for inputs and gradients
    one a tensor        tensorwise
    one an output row   rowwise; the weight's scales stay float32 where the recipe has powers of two
    128x128 blocks      blockwise, use_f32_scales
    1x32, E8M0          mxfp8
    1x16 and a tensor   nvfp4, disable_2d_quantization

The families are those of transformers whose linears are modules: experts in stacks have other names than in the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..nn.convert import convert_to_fp8
from ..nn.frozen_weights import save_in_high_precision
from ..nn.linear import Fp8Linear
from ..nn.module_lookup import groups_of
from ..numerics import nvfp4
from ..numerics.formats import E2M1, E4M3
from ..numerics.rule import BLOCK_1X16, BLOCK_1X32, BLOCK_128X128, ROW, TENSOR, Granularity, Rule
from ..params.frozen_parameter import parameter_of_codes
from ..quantizer import Quantizer
from ..recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from .directory import CONFIG, GENERATION, Tensors, read_json
from .weight_decoder import (
    check_readable,
    check_scale,
    fp4_weights,
    is_of_cache,
    is_scale,
    read_factor,
    read_weight,
    scale_name,
)

_RECIPES: dict[Granularity, Recipe] = {
    TENSOR: Float8CurrentScaling(),
    ROW: Float8RowwiseScaling(),
    BLOCK_128X128: Float8BlockScaling(use_f32_scales=True),
    BLOCK_1X32: MXFP8BlockScaling(),
    BLOCK_1X16: NVFP4BlockScaling(disable_2d_quantization=True),
}


def load_frozen(directory: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Load a causal language model of transformers from a quantized directory; its codes are frozen weights.

    The result equals ``freeze_weights(convert_to_fp8(model))`` of the decoded model, but the decoded weights are never
    in memory. The recipe quantizes inputs; the directory's input scales are not used.

    Args:
        directory: config.json and safetensors, as `megatron-fp8 export`, llm-compressor, modelopt or DeepSeek write them.
        dtype: of the other parameters, and of what reads frozen weights in high precision.

    Returns:
        The model, in evaluation mode, with the directory's generation_config.json.

    Raises ValueError: no weight is quantized, or by a format that cannot be read; linears have scales of different kinds;
    a tensor is missing, of another shape, unexpected or damaged (NaN).
    """
    folder = Path(directory)
    config = read_json(folder / CONFIG)
    check_readable(config)
    with Tensors(folder) as tensors:
        tensors.view_fp4(fp4_weights(tensors))
        names = tensors.names()
        quantized = {name for name in names if name.endswith(".weight") and scale_name(name, names)}
        if not quantized:
            raise ValueError(
                f"{str(folder)!r} has no quantized weight: load it with from_pretrained, and call convert_to_fp8 and"
                " freeze_weights."
            )
        kinds = {_granularity(name, tensors): name for name in sorted(quantized)}
        if len(kinds) > 1:
            raise ValueError(
                f"{str(folder)!r} has scales of different kinds ({' and '.join(kinds.values())}): one recipe is needed."
                " Load it with transformers' dequantize=True, and call convert_to_fp8 with overrides."
            )
        model = _empty_model(config, dtype)
        recipe = _RECIPES[next(iter(kinds))]

        def high_precision_in_directory(name: str, _: Any) -> bool:
            return f"{name}.weight" not in quantized

        convert_to_fp8(model, recipe, skip=[high_precision_in_directory])
        _fill(model, tensors, quantized, dtype, str(folder))
    for group in groups_of(model):
        group.frozen = True
    save_in_high_precision(model)
    model.config._name_or_path = model.name_or_path = str(folder)
    if (folder / GENERATION).exists():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _empty_model(config: dict[str, Any], dtype: torch.dtype) -> Any:
    """The model with parameters on the meta device and real buffers."""
    from accelerate import init_empty_weights
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    plain = {
        k: v for k, v in config.items() if k not in ("quantization_config", "compression_config", "auto_map")
    }
    kind = plain.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"config.json has model_type={kind!r}, which this transformers does not know.")
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **plain), dtype=dtype)


def _fill(model: Any, tensors: Tensors, quantized: set[str], dtype: torch.dtype, folder: str) -> None:
    """Gives every parameter the directory's tensor."""
    model.tie_weights()
    wanted = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - wanted.keys()
    names = tensors.names()
    for name in sorted(names - wanted.keys() - tied):
        if not (is_scale(name) or is_of_cache(name)):
            raise ValueError(f"{folder!r} has {name}, which {type(model).__name__} has not.")
    for name, empty in wanted.items():
        if name not in names:
            raise ValueError(
                f"{folder!r} has no {name}, which {type(model).__name__} asks for. Experts that transformers stacks"
                " cannot be loaded as codes: load them with transformers' dequantize=True."
            )
        if tensors.shape(name) != list(empty.shape):
            raise ValueError(
                f"{name} is {tensors.shape(name)} in {folder!r}, and config.json says {list(empty.shape)}."
            )
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        if name in quantized and isinstance(owner, Fp8Linear):
            owner._parameters[last] = _frozen(name, owner, tensors, dtype)
            continue
        value = read_weight(name, tensors) if name in quantized else tensors[name]
        owner._parameters[last] = torch.nn.Parameter(value.to(dtype), requires_grad=False)
    model.tie_weights()


def _granularity(name: str, tensors: Tensors) -> Granularity:
    """Which values share a scale. Raises ValueError: none of the kinds that can be read."""
    (rows, cols), scale = tensors.shape(name), scale_name(name, tensors.names())
    assert scale is not None
    shape, size = tensors.shape(scale), 1
    for length in shape:
        size *= length
    if tensors.dtype(name) == E2M1.dtype:
        return BLOCK_1X16
    if tensors.dtype(scale) == torch.uint8 and shape == [rows, -(-cols // 32)]:
        return BLOCK_1X32
    if shape == [-(-rows // 128), -(-cols // 128)]:  # a small matrix is one block
        return BLOCK_128X128
    if size == 1:
        return TENSOR
    if size == rows == shape[0]:
        return ROW
    raise ValueError(
        f"{name} is {[rows, cols]} with scales {shape}: one, one per row, 128x128, 1x32 or 1x16 can be read."
    )


def _frozen(name: str, linear: Fp8Linear, tensors: Tensors, dtype: torch.dtype) -> Any:
    """The parameter of a quantized weight [N, K]."""
    granularity, key = _granularity(name, tensors), scale_name(name, tensors.names())
    assert key is not None
    codes, scale = tensors[name], tensors[key]
    site = linear.fp8_sites.on(codes.device)
    quantizer = site.weights.frozen_quantizer()
    assert quantizer is not None
    shape = torch.Size(tensors.shape(name))
    if granularity == BLOCK_1X16:
        read_weight(name, tensors)  # raises for damaged scales
        amax = _tensor_amax(name, read_factor(name, tensors))
        return parameter_of_codes(codes, scale, quantizer, dtype, shape, amax)
    if codes.dtype != E4M3.dtype or bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise ValueError(f"{name} is damaged, or not E4M3: it is {codes.dtype}, and no code may be NaN.")
    if granularity == BLOCK_1X32:
        if bool((scale == 255).any()):
            raise ValueError(f"{name} is damaged: a scale of it is 255, which is NaN in E8M0.")
        return parameter_of_codes(codes, scale.view(torch.float8_e8m0fnu), quantizer, dtype, shape)
    check_scale(name, scale)
    scale = scale.float()
    if granularity == ROW:
        quantizer = Quantizer(Rule(E4M3, ROW, "fp32"), quantizer.slot, quantizer.backend)
        scale = scale.reshape(-1, 1)
    return parameter_of_codes(
        codes, scale.reshape(()) if granularity == TENSOR else scale, quantizer, dtype, shape
    )


def _tensor_amax(name: str, factor: torch.Tensor) -> torch.Tensor:
    """float32 [], the amax of which ``factor`` is NVFP4's second scale, exactly. Raises ValueError: there is none."""
    near = factor * nvfp4.LARGEST
    bits = near.view(torch.int32) + torch.arange(-4, 5, dtype=torch.int32, device=near.device)
    candidates = bits.view(torch.float32)
    exact = candidates[nvfp4.tensor_scale_inv(candidates) == factor]
    if not len(exact):
        raise ValueError(
            f"{name} has a tensor scale of {float(factor):.9g}, which no largest value gives by NVFP4's rule: its codes"
            " cannot be used as they are. Load it with transformers, and call convert_to_fp8 and freeze_weights."
        )
    return exact[0]
