"""freeze_weights: a converted model's weights as FP8 codes alone, for adapters to train around them.

    model = freeze_weights(convert_to_fp8(model, "mxfp8"))
    model = get_peft_model(model, LoraConfig(...))

Modules, names and GEMM sites stay. Only the parameter of each linear changes, so whatever wraps a linear (PEFT, hooks,
checkpointing) works as before. inference's prepare_for_inference does the same to a model that no gradient enters.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, TypeVar

import torch

from ..files.terminal import print_rank_0
from ..numerics.rule import Rule
from ..params.fp8_parameter import Fp8Parameter
from ..params.frozen_parameter import frozen_parameter
from .experts import Fp8ExpertLinear, Fp8Experts
from .linear import Fp8Layer, Fp8Linear
from .module_lookup import fp8_linears, groups_of

M = TypeVar("M", bound=torch.nn.Module)


@torch.no_grad()
def freeze_weights(model: M) -> M:
    """Store the weights of all FP8 linears as codes: one byte a value and scales, NVFP4's half a byte. In place.

    The weights take no gradient afterwards: fprop and dgrad multiply the codes, and wgrad does not run. Codes equal those
    of a training forward of the model as it is; delayed scaling without a history uses the weight's own amax. Weights
    that a plan multiplies in high precision in fprop, that are computed (parametrizations), or that are stored transposed
    (GPT-2's Conv1D, whose layout adapters read) stay as they are.
    ``weight.dequantize(torch.float32)`` is what the codes mean, exactly; everything else that reads the weight (DoRA's
    norms, state dicts) sees it rounded to the old dtype. ``save_pretrained`` of a transformers model writes that too.

    Args:
        model: after convert_to_fp8, before get_peft_model and the optimizer. transformers' stacks of experts become one
            parameter an expert, so PEFT's ``target_parameters`` cannot name them.

    Returns:
        The model.

    Raises ValueError: no linear can be frozen; DoRA's magnitudes were made from other values already; a weight is
    sharded, gathered as codes, on the meta device or rounded stochastically. The model is unchanged then.
    """
    linears = {name: linear for name, linear in fp8_linears(model).items() if _freezes(linear)}
    if not linears:
        raise ValueError(
            f"{type(model).__name__} has no FP8 weight to freeze: fprop of every linear reads its weight in high"
            " precision, stores it transposed (Conv1D), or is frozen already"
        )
    _check(model, linears)
    counts = Counter(map(codes_key, linears.values()))
    last = {linear.around: linear for linear in linears.values() if isinstance(linear, Fp8ExpertLinear)}
    shared: dict[tuple[int, Rule], Any] = {}  # codes of weights that several linears have
    before = after = 0
    for linear in linears.values():
        key = codes_key(linear)
        weight = shared.get(key)
        if weight is None:
            before += linear.matrix.nbytes
            quantizer = linear.fp8_site.weights.frozen_quantizer()
            assert quantizer is not None
            weight = frozen_parameter(linear.matrix, quantizer)
            after += sum(tensor.nbytes for tensor in weight.stored_tensors())
        if counts[key] > 1:
            shared[key] = weight
        linear._parameters["weight"] = weight
        linear.fp8_site.weights.forget()
        if isinstance(linear, Fp8ExpertLinear) and last[linear.around] is linear:
            linear.around.split_stacks()
    for group in groups_of(model):
        group.frozen = True
    save_in_high_precision(model)
    print_rank_0(f"{len(linears)} weights frozen as codes: {before:,} -> {after:,} bytes", to="stdout")
    return model


@torch.no_grad()
def dequantize_weights(model: M, dtype: torch.dtype | None = None) -> M:
    """Undo ``freeze_weights``: weights are what the codes mean, in high precision, still without gradients. In place.

    Args:
        dtype: of the weights, rounded once from code * scale; None: as before they were frozen. With float32 PEFT's
            ``merge_and_unload`` adds without a loss, if the adapters are float32.

    Raises ValueError: the model has no frozen weight.
    """
    stacks: dict[Fp8Experts, None] = {}
    values: dict[int, torch.nn.Parameter] = {}
    for linear in fp8_linears(model).values():
        weight: Any = linear._parameters.get("weight")
        if not isinstance(weight, Fp8Parameter) or weight.is_gathered:
            continue
        if id(weight._stored) not in values:
            matrix = linear.to_stored_layout(weight.dequantize(dtype)).contiguous()
            values[id(weight._stored)] = torch.nn.Parameter(matrix, requires_grad=False)
        linear._parameters["weight"] = values[id(weight._stored)]
        if isinstance(linear, Fp8ExpertLinear):
            stacks[linear.around] = None
    if not values:
        raise ValueError(f"{type(model).__name__} has no weight that freeze_weights made codes")
    for experts in stacks:
        experts.join_stacks()
    for group in groups_of(model):
        group.frozen = False
    return model


def _freezes(linear: Fp8Layer) -> bool:
    """Whether this linear's weight becomes codes."""
    if not isinstance(linear, (Fp8Linear, Fp8ExpertLinear)):
        return False
    quantized = linear.weight_parameter is not None and linear.fp8_site.casts["weight"].rowwise is not None
    return quantized and not isinstance(linear.weight_parameter, Fp8Parameter)


def _check(model: torch.nn.Module, linears: dict[str, Fp8Layer]) -> None:
    """Raises ValueError if a weight cannot be frozen, or is frozen too late."""
    if dora := [name for name, _ in model.named_modules() if "lora_magnitude_vector." in name]:
        raise ValueError(
            f"{dora[0]}: DoRA's magnitudes are norms of the weights before they were frozen: call freeze_weights before"
            " get_peft_model"
        )
    for name, linear in linears.items():
        weight, quantizer = linear.weight_parameter, linear.fp8_site.casts["weight"].rowwise
        assert quantizer is not None
        if hasattr(weight, "to_local") or hasattr(weight, "fsdp_pre_all_gather"):
            raise ValueError(
                f"{name}: its weight is sharded, or is gathered as codes (enable_fp8_all_gather): freeze_weights needs"
                " the whole weight, on every rank"
            )
        if linear.fp8_device.type == "meta":
            raise ValueError(f"{name}: its weight is on the meta device: load the weights first")
        if quantizer.rule.stochastic:
            raise ValueError(
                f"{name}: its weight is rounded stochastically, and frozen codes would keep one draw: give the recipe's"
                " weight rule stochastic=False"
            )


def codes_key(linear: Any) -> tuple[int, Rule]:
    """Key that is equal for linears with the same weight tensor and rule."""
    own = linear._parameters.get("weight")  # None for an expert: its slice of the stack is not shared
    return id(linear if own is None else own), linear.fp8_site.weights.casts.rowwise.rule


def save_in_high_precision(model: torch.nn.Module) -> None:
    """Make ``save_pretrained`` of the model, and of models inside it (in PEFT's wrapper), write dequantized weights."""
    for each in model.modules():
        if hasattr(type(each), "save_pretrained"):
            each.save_pretrained = partial(_save_pretrained, each)  # type: ignore[assignment]  # a method has no pickle


def _save_pretrained(
    model: Any, save_directory: Any, *args: Any, state_dict: Any = None, **options: Any
) -> Any:
    dequantized: dict[int, torch.Tensor] = {}  # shared weights stay shared
    plain = {}
    for name, tensor in (model.state_dict() if state_dict is None else state_dict).items():
        if isinstance(tensor, Fp8Parameter):
            key = tensor.codes[0].data_ptr()
            if key not in dequantized:
                layer = model.get_submodule(name.rpartition(".")[0])
                dequantized[key] = layer.to_stored_layout(tensor.dequantize()).contiguous()
            tensor = dequantized[key]
        plain[name] = tensor
    return type(model).save_pretrained(model, save_directory, *args, state_dict=plain, **options)
