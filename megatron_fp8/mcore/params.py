"""FP8 weights under Megatron-Core: creation, storage, data parallelism.

Until ``DistributedDataParallel`` wraps the model, weights are ordinary BF16 parameters: they are initialised, loaded,
inspected and moved as in any model. ``DistributedDataParallel`` turns them into ``Fp8Parameter``s. At that point
every linear has its full name, so the plan (first and last layers, overrides by name) selects the weights, and no
master or buffer refers to them yet. A user sets ``fp8_param=True`` and nothing else. Without DistributedDataParallel,
call ``make_fp8_params`` before making the optimizer.

Rejected: making them in the linear's ``__init__``. There a linear has its layer number but not its name, so an
override by name would come too late, and each way of initialising or loading weights would need code for FP8.

Codes are sent where both directions share them. Rowwise and MXFP8 weights need both directions from high precision,
and Megatron's buffers count elements, not the bytes of two NVFP4 codes each, so BF16 is sent. With
``reuse_grad_buf_for_mxfp8_param_ag`` it goes through the gradient buffer, which is idle then. Without it, the
distributed optimizer would need a BF16 buffer as large as the weights beside the codes, so such weights stay BF16
parameters and are cast every iteration, which is the same number of bytes; the report notes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import fp8_utils
from ..files.terminal import print_rank_0
from ..fp8_utils import get_fp8_recipe, has_fp8_params, switch_of
from ..linear.gemm_site import mark_zeros, unmark_zeros
from ..numerics.formats import E2M1
from ..params.fp8_parameter import (
    Fp8Parameter,
    TwoWayFp8Parameter,
    broadcast,
    fp8_parameter,
)
from ..plan.overrides import Override
from ..recipe import RECIPES
from .layers.linear import Fp8OutputLayer
from .patches.patching import PatchList
from .runtime import runtime_of, unwrap
from .sites import fp8_linears, prepare

patches = PatchList()
_DDP = "distributed.distributed_data_parallel.DistributedDataParallel"


def make_fp8_params(model_chunks: list[Any], *, two_way: bool = True) -> list[str]:
    """Turns the weights of this rank's FP8 GEMM sites into FP8 parameters; returns their names.

    Weights that the plan leaves in BF16 do not change. Chunks that were converted before are skipped.

    Args:
        two_way: False: weights that need separate rowwise and columnwise codes stay in BF16; the report says so.

    Raises:
        ValueError: a weight is not BF16, or its rule rounds stochastically.
        RuntimeError: the weights belong to a DistributedDataParallel already.
    """
    prepare(model_chunks)
    converted = []
    for chunk in model_chunks:
        for linear in fp8_linears([chunk]):
            site, weight = linear.fp8_site, linear.weight
            quantizer = site.quantizers["weight"]
            if quantizer is None or isinstance(weight, Fp8Parameter):
                continue
            if isinstance(linear, Fp8OutputLayer):
                site.notes.add(_OUTPUT_STAYS_BF16)
                continue
            if (quantizer.rule.fmt is E2M1) != bool(linear.config.fp4):
                site.notes.add(_FP8_STAYS_BF16 if linear.config.fp4 else _NVFP4_STAYS_BF16)
                continue
            if quantizer is not site.casts["weight"].shared:
                site.notes.add(_TWO_KINDS)
                continue
            if not two_way and (linear.config.fp4 or not quantizer.rule.granularity.symmetric):
                site.notes.add(_STAYS_BF16)
                continue
            if hasattr(weight, "main_grad"):
                raise RuntimeError(
                    f"{site.plan.name}.weight is in DistributedDataParallel's buffers already: call make_fp8_params, or"
                    " megatron_fp8.mcore.install(), before wrapping the model"
                )
            if weight.dtype != torch.bfloat16:
                field = f"{switch_of(linear.config)}_param"
                raise ValueError(
                    f"{field}=True: {site.plan.name}.weight is {weight.dtype}, and masters are rounded to BF16 before"
                    f" they are cast. Set bf16=True and params_dtype=torch.bfloat16, or {field}=False."
                )
            linear.weight = fp8_parameter(weight, quantizer)
            converted.append(f"{site.plan.name}.weight")
        model = unwrap(chunk)
        runtime_of(model.config).fp8_params.add(model)
    return converted


_STAYS_BF16 = (
    "fp8_param: the weight stays BF16 under the distributed optimizer without reuse_grad_buf_for_mxfp8_param_ag, and is"
    " cast every iteration"
)


_OUTPUT_STAYS_BF16 = "fp8_param: the output layer's weight stays BF16 and is cast every iteration"

_FP8_STAYS_BF16 = "fp4_param: a weight in FP8 stays BF16 and is cast every iteration"

_NVFP4_STAYS_BF16 = "fp8_param: a weight in NVFP4 stays BF16 and is cast every iteration"

_TWO_KINDS = (
    "fp8_param: the weight stays BF16 and is cast every iteration: fprop and dgrad do not share codes"
)


def fp8_params(module: torch.nn.Module) -> list[Fp8Parameter]:
    """Returns the FP8 parameters of a module."""
    return [p for p in module.parameters() if isinstance(p, Fp8Parameter)]


def parameter_bytes(model_chunks: list[Any]) -> dict[str, Any]:
    """Returns this rank's FP8 weights as numbers: weights, values, bytes of codes and scales; and a warning or None."""
    found = [p for chunk in model_chunks for p in fp8_params(chunk)]
    return {
        "weights": len(found),
        "values": sum(p.numel() for p in found),
        "bytes": sum(t.numel() * t.element_size() for p in found for t in p.stored_tensors()),
        "warning": memory_warning(model_chunks),
    }


def gather_settings(config: Any, *, distributed: bool, share: bool | None = None) -> dict[str, bool]:
    """Returns the DistributedDataParallelConfig fields for this config's FP8 parameters; OptimizerConfig takes the
    second.

    Args:
        distributed: use_distributed_optimizer.
        share: send weights that travel in BF16 through the gradient buffer; None: if there are such weights.
    """
    enabled = has_fp8_params(config)
    if share is None:
        share = enabled and distributed and gathers_in_bf16(config)
    return {"fp8_param_gather": enabled, "reuse_grad_buf_for_mxfp8_param_ag": share}


def gathers_in_bf16(config: Any) -> bool:
    """Whether every FP8 weight of this config needs different codes for each direction (rowwise, mxfp8 and nvfp4).

    Such weights can share the gradient buffer (reuse_grad_buf_for_mxfp8_param_ag); a mixture by overrides cannot.
    """
    if not has_fp8_params(config) or config.fp4:
        return has_fp8_params(config)
    overrides = [Override.of(*entry) for entry in (getattr(config, "fp8_overrides", None) or {}).items()]
    names = {override.value for override in overrides if override.covers("weight")} & set(RECIPES) - {"nvfp4"}
    rules = [get_fp8_recipe(config, name).rule("weight") for name in (None, *sorted(names))]
    return all(rule is not None and not rule.granularity.symmetric for rule in rules)


# ------------------------------------------------------------------------------------------- DistributedDataParallel


@patches.wrap(f"{_DDP}.__init__", "weights become FP8 before buffers hold them")
def make_params_first(
    original: Callable[..., None],
    self: Any,
    config: Any,
    ddp_config: Any,
    module: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Makes weights FP8 parameters first if the config has fp8_param, or fp4_param."""
    enabled = has_fp8_params(config)
    if ddp_config.fp8_param_gather and not enabled:
        raise ValueError(
            f"DistributedDataParallelConfig.fp8_param_gather=True, and the model's config has fp8={config.fp8!r},"
            f" fp8_param={getattr(config, 'fp8_param', False)!r}: set fp8_param=True there, which also sets this, or"
            " drop it"
        )
    if enabled:
        ddp_config.fp8_param_gather = True
        _check_buffers(config, ddp_config)
        shares = ddp_config.reuse_grad_buf_for_mxfp8_param_ag
        make_fp8_params([module], two_way=shares or not ddp_config.use_distributed_optimizer)
        if warning := memory_warning([module]):
            print_rank_0(f"megatron_fp8: warning: {warning}", once=True)
    original(self, config, ddp_config, module, *args, **kwargs)


def _check_buffers(config: Any, ddp_config: Any) -> None:
    """Raises ValueError for gather settings that Megatron-Core would accept and handle wrongly."""
    if ddp_config.use_megatron_fsdp:
        raise ValueError(
            "fp8_param=True with use_megatron_fsdp=True is not available in this version: use the distributed optimizer"
            " (use_distributed_optimizer=True), or set fp8_param=False"
        )
    if not ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
        return
    if not ddp_config.use_distributed_optimizer:
        raise ValueError(
            "reuse_grad_buf_for_mxfp8_param_ag=True needs use_distributed_optimizer=True: without it no parameter is"
            " gathered. Drop it."
        )
    if not gathers_in_bf16(config):
        raise ValueError(
            "reuse_grad_buf_for_mxfp8_param_ag=True is for models whose FP8 weights are all sent in BF16 (fp8_recipe"
            f" 'rowwise' or 'mxfp8'); fp8_recipe={config.fp8_recipe!r} with fp8_overrides="
            f"{getattr(config, 'fp8_overrides', None) or {}!r} has weights that are sent as codes. Set it to False."
        )


def memory_warning(model_chunks: list[Any]) -> str | None:
    """Returns a warning if this rank's FP8 weights take more memory than BF16 weights would; else None."""
    linears = fp8_linears(model_chunks)
    if any(_STAYS_BF16 in linear.fp8_site.notes for linear in linears):
        return (
            "fp8_param=True (or fp4_param=True) saves nothing here. Rowwise, MXFP8 and NVFP4 weights need different codes"
            " for each direction, so under the distributed optimizer BF16 is sent, and BF16 weights are stored beside the"
            " codes: set reuse_grad_buf_for_mxfp8_param_ag=True in DistributedDataParallelConfig and OptimizerConfig, to"
            " send them through the gradient buffer, or use delayed, tensorwise or blockwise"
        )
    if any(type(linear.weight) is TwoWayFp8Parameter for linear in linears):
        return (
            "rowwise and MXFP8 weights are stored in both directions, 2 bytes a value and scales: slightly more than BF16"
            " training's weights, and half of what fp8_param=False stores"
        )
    return None


@patches.wrap(f"{_DDP}.broadcast_params", "it would move a dequantized copy")
def broadcast_codes_too(original: Callable[[Any], None], self: Any) -> None:
    """Megatron's own would broadcast a copy of an FP8 parameter."""
    if not fp8_params(self.module):
        original(self)
        return
    for param in self.module.parameters():
        group = self.dp_cp_group if getattr(param, "allreduce", True) else self.expt_dp_group
        source = dist.get_global_rank(group, 0)
        if isinstance(param, Fp8Parameter):
            broadcast(param, source, group)
        else:
            dist.broadcast(param.data, src=source, group=group)


_ZEROS = "the first weight gradient of an iteration would be added to zeros: four times the bytes"


@patches.wrap(f"{_DDP}.zero_grad_buffer", _ZEROS)
def zero_and_mark(original: Callable[[Any], None], self: Any) -> None:
    """Marks the buffers of parameters whose backward hook removes the mark."""
    original(self)
    mark_zeros(param for param in self.params_with_grad if hasattr(param, "main_grad_zeros"))


@patches.wrap(f"{_DDP}._make_backward_post_hook", _ZEROS)
def hook_that_unmarks(
    original: Callable[..., Callable[..., None]], self: Any, param: torch.nn.Parameter
) -> Callable[..., None]:
    """The hook that adds autograd's gradient to main_grad also removes the mark."""
    hook = original(self, param)
    unmark_zeros([param])

    def unmarking(*unused: Any) -> None:
        unmark_zeros([param])
        hook(*unused)

    return unmarking


def refuse_bf16_weights(model: Any) -> None:
    """Raises RuntimeError if fp8_param is on and this model, about to train, has no FP8 parameters."""
    config = model.config
    if has_fp8_params(config) and unwrap(model) not in runtime_of(unwrap(model).config).fp8_params:
        raise RuntimeError(
            f"{switch_of(config)}_param=True, and the model's weights are still BF16: wrap it in Megatron-Core's"
            " DistributedDataParallel after megatron_fp8.mcore.install(), or call"
            " megatron_fp8.mcore.params.make_fp8_params([model]) before the optimizer is made"
        )


_WHY = "FP8 weights are this package's class, without Transformer Engine"
for _name, _replacement in {
    "FP8_TENSOR_CLASS": Fp8Parameter,
    "HAVE_TE_FP8_TENSOR_CLASS": True,
    "HAVE_TE_MXFP8TENSOR": True,
    "_modify_underlying_storage_impl": fp8_utils.modify_underlying_storage,
    "_quantize_param_shard_impl": fp8_utils.quantize_param_shard,
    "_correct_amax_history_if_needed_impl": fp8_utils.correct_amax_history_if_needed,
    "te_post_all_gather_processing": fp8_utils.post_all_gather_processing,
}.items():
    patches.replace(f"fp8_utils.{_name}", _replacement, _WHY)
patches.replace("fp8_utils.MXFP8Tensor", TwoWayFp8Parameter, "such weights travel in BF16", create=True)
patches.replace(
    "fp8_utils.dequantize_fp8_tensor",
    fp8_utils.dequantize_fp8_tensor,
    "it asks for Transformer Engine's version",
    everywhere=True,
)
