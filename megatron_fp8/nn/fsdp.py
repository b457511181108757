"""FP8 all-gather for fully_shard (FSDP2): one byte per value.

fully_shard stores a weight as shards and gathers it before use. A weight of this class is quantized before
the gather, with the scale of the whole weight. The gathered codes are therefore bit-identical to those of a
weight quantized after the gather. The linear gets an Fp8Parameter over FSDP's own buffer, which FSDP frees
after the forward and refills for the backward; no rank stores the codes of all weights in between.

The scale of a whole weight needs its amax over all ranks. After the weights have changed, the first gather
shares the amaxes of all weights in one all-reduce. Delayed scaling knows its scales and needs none.

Codes that serve one direction only (per row, 1x32) cannot be converted to the other. Such weights are
gathered in high precision and quantized afterwards. So are weights whose 128x128 blocks a shard boundary
would cut.

Rejected: gathering one scale per shard with the codes. Neither the values nor the columnwise codes would be
those of the recipe.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from ..files.terminal import print_rank_0
from ..numerics.scaling import compute_amax
from ..params.fp8_parameter import Fp8Parameter
from ..quantizer import Quantizer
from .fp8_group import Fp8Group
from .linear import Fp8Linear
from .module_lookup import fp8_linears

aten = torch.ops.aten


def enable_fp8_all_gather(model: torch.nn.Module) -> list[str]:
    """Make fully_shard gather this model's FP8 weights as codes. Call it after convert_to_fp8 and before
    fully_shard.

        model = convert_to_fp8(model)
        enable_fp8_all_gather(model)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = ...                        # after fully_shard, as always

    Returns:
        Names of the linears whose weights are gathered as codes. The others' recipes quantize each direction
        from high precision (rowwise, mxfp8), have 4-bit codes (nvfp4), or leave the weight unquantized; or they
        are Conv1Ds, experts or parametrised. The count is also printed.

    Raises:
        ValueError: the model has no FP8 linear, is sharded already, or has no weight that can be gathered as
            codes.
    """
    wrapped: dict[int, torch.nn.Parameter] = {}
    names = []
    linears = fp8_linears(model)
    for name, linear in linears.items():
        if not isinstance(linear, Fp8Linear):
            continue
        weight = linear.weight_parameter
        if weight is None:  # parametrised: its source parameters are gathered
            continue
        if hasattr(weight, "to_local"):
            raise ValueError(
                f"{name}.weight is sharded already: call enable_fp8_all_gather before fully_shard"
            )
        rule = linear.fp8_config.resolved_recipe.rule("weight")
        # One set of codes serves both directions, a byte a value.
        both_ways = rule is not None and rule.granularity.symmetric and rule.fmt.codes_per_byte == 1
        if not both_ways or "weight" in linear.fp8_config.unquantized:
            continue
        if id(weight) not in wrapped:
            value = weight.detach()
            wrapped[id(weight)] = torch.nn.Parameter(
                GatheredAsCodes(value), requires_grad=weight.requires_grad
            )
        names.append(name)
    if not names:
        raise ValueError(
            "no weight of this model can be gathered as FP8 codes: its recipe quantizes each direction from high"
            " precision, or not at all; use tensorwise, delayed or blockwise,"
            " or fully_shard without enable_fp8_all_gather"
        )
    for module in model.modules():  # includes tied weights
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in wrapped:
                module._parameters[key] = wrapped[id(parameter)]
    print_rank_0(
        f"megatron_fp8: fully_shard will gather {len(names)} of {len(linears)} FP8 weights as codes",
        to="stdout",
    )
    return names


def disable_fp8_all_gather(model: torch.nn.Module) -> None:
    """Undo ``enable_fp8_all_gather`` in an unsharded model: weights become ordinary parameters again."""
    unwrapped: dict[int, torch.nn.Parameter] = {}
    parameter: Any
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if isinstance(parameter, GatheredAsCodes):
                plain = torch.nn.Parameter(parameter._value, requires_grad=parameter.requires_grad)
                module._parameters[key] = unwrapped.setdefault(id(parameter), plain)


class _Cast(NamedTuple):
    """Metadata of the gathered weight that each rank has without communication."""

    quantizer: Quantizer
    outer_size: torch.Size
    scale_inv: torch.Tensor | None  # None: gathered with the codes
    amax: torch.Tensor
    nonfinite: torch.Tensor


class GatheredAsCodes(torch.Tensor):
    """A high-precision weight or shard that fully_shard gathers as FP8 codes.

    It behaves like the tensor inside: optimizers, state dicts and pickles see ordinary numbers.
    """

    _value: torch.Tensor
    _amax: tuple[Any, torch.Tensor] | None
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value: torch.Tensor) -> GatheredAsCodes:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            value.size(),
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            layout=value.layout,
            device=value.device,
        )
        self._value, self._amax = value, None
        return self

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        plain = tree_map(lambda x: x._value if isinstance(x, cls) else x, (args, kwargs))
        out = func(*plain[0], **plain[1])
        if func not in _WRAPPED_OPS:
            return out
        wrapped = tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, out)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_value"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> GatheredAsCodes:
        return GatheredAsCodes(inner["_value"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the tensor inside, so a file can be read without this package."""
        return self._value.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredAsCodes({self._value!r})"

    # ------------------------------------------------------------------------------------- what fully_shard calls

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: torch.nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], _Cast | None]:
        """Called by FSDP before the gather. Returns (tensors to send: codes as bytes, and block scales; metadata)."""
        assert isinstance(module, Fp8Linear)
        _check_reshard_mesh(module.fp8_group)
        dtype, world = mp_policy.param_dtype or self.dtype, mesh.size()
        value = _padded(self._value.to(dtype), -(-outer_size[0] // world))
        module.fp8_group.make_sites(value.device)
        site = module.fp8_sites.on(value.device)
        quantizer = site.casts["weight"].shared
        if quantizer is None or not _whole_blocks(quantizer, outer_size, world):
            why = (
                "its GEMMs do not share its codes"
                if quantizer is None
                else "a shard's boundary cuts its blocks"
            )
            site.notes.add(f"weight gathered in high precision: {why}")
            return (value,), None
        per_tensor = quantizer.rule.granularity.is_tensor
        # With one rank nothing is gathered, and fully_shard copies the first tensor only.
        scales_travel = world > 1 and not per_tensor

        def share(amax: torch.Tensor) -> None:
            amax.copy_(self._whole_amax(module.fp8_group, mesh.get_group(), dtype))

        done = quantizer.quantize(value, "rowwise", reduce_amax=share if per_tensor else None)
        side = done.tensor.rowwise
        assert side is not None
        nonfinite = (
            torch.zeros((), dtype=torch.int64, device=value.device)
            if done.nonfinite is None
            else done.nonfinite.to(value.device)
        )
        scale_inv = None if scales_travel else side.scale_inv
        known = _Cast(quantizer, outer_size, scale_inv, done.amax, nonfinite)
        codes = side.codes.view(torch.uint8)
        # Kernels pad the rows of scales for the GEMM; gathered tensors must be contiguous.
        return (codes, side.scale_inv.contiguous()) if scales_travel else (codes,), known

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        known: _Cast | None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """The gathered weight over FSDP's buffer. With ``out``: updates the earlier tensor over the same buffer."""
        if known is None:
            return None if out is not None else (outputs[0], ())
        scale_inv = outputs[1].clone() if known.scale_inv is None else known.scale_inv
        if out is not None:
            assert isinstance(out, Fp8Parameter)
            out.set_scales([scale_inv], known.amax, known.nonfinite)
            return None
        codes = outputs[0][: known.outer_size[0]]
        gathered = _GatheredParameter.of_codes(
            known.quantizer, param_dtype, codes, scale_inv, known.amax, known.nonfinite
        )
        return gathered, ()

    def _whole_amax(self, fp8_group: Fp8Group, ranks: Any, dtype: torch.dtype) -> torch.Tensor:
        """float32 [], the amax of the whole weight. One all-reduce serves all weights that have changed."""
        weight_generation = fp8_group.state(self._value.device).weight_generation
        if self._amax is None or self._amax[0] != (weight_generation, self._value._version):
            # Not to_local(): it returns a new tensor object each time, and this one caches the amax.
            local = [getattr(linear.weight_parameter, "_local_tensor", None) for linear in fp8_group.linears]
            stale = {id(s): s for s in local if isinstance(s, GatheredAsCodes) and s.device == self.device}
            shards = list({**stale, id(self): self}.values())
            amaxes = torch.stack([compute_amax(shard._value.to(dtype)) for shard in shards])
            dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=ranks)
            fp8_group.state(self._value.device).counts.scaling_collectives += 1
            for shard, amax in zip(shards, amaxes.unbind(), strict=True):
                shard._amax = ((weight_generation, shard._value._version), amax)
        assert self._amax is not None
        return self._amax[1]


_checked_groups: weakref.WeakSet[Fp8Group] = weakref.WeakSet()


def _check_reshard_mesh(fp8_group: Fp8Group) -> None:
    """Raises ValueError, before a model's first forward, if fully_shard reshards to fewer ranks after the forward.
    torch cannot gather from such a mesh for weights with their own all-gather."""
    if fp8_group in _checked_groups:
        return
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    for module in list(_module_state_mapping):
        if not isinstance(module, FSDPModule):
            continue
        for shards in _parameter_groups(module):
            belongs_to_group = any(
                isinstance(parameter._sharded_local_tensor, GatheredAsCodes)
                and getattr(parameter._module_info.module, "fp8_group", None) is fp8_group
                for parameter in shards.fsdp_params
            )
            if belongs_to_group and shards._use_post_forward_mesh:
                raise ValueError(
                    "fully_shard(reshard_after_forward=NUMBER) does not go together with enable_fp8_all_gather: use True"
                    " (the default) or False, or fully_shard without enable_fp8_all_gather"
                )
    _checked_groups.add(fp8_group)


def _parameter_groups(module: Any) -> list[Any]:
    """torch's parameter groups of one fully_shard call. Up to torch 2.11 there is at most one."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


class _GatheredParameter(Fp8Parameter):
    """The weight that FSDP puts into the module while it is gathered."""

    is_gathered = True

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.as_strided.default and list(args[1]) == list(args[0].shape):
            return args[0].alias()  # FSDP sets the shape that the tensor already has
        return super().__torch_dispatch__(func, types, args, kwargs)


def _padded(value: torch.Tensor, rows: int) -> torch.Tensor:
    """The shard [own rows, cols] padded with zeros to [rows, cols]: FSDP gathers shards of equal size."""
    return torch.nn.functional.pad(value, (0, 0, 0, rows - value.shape[0]))


def _whole_blocks(quantizer: Quantizer, outer_size: torch.Size, world: int) -> bool:
    rows = quantizer.rule.granularity.rows
    return rows == 0 or outer_size[0] % (rows * world) == 0


_WRAPPED_OPS = {
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.copy_.default,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten._pin_memory.default,
    aten.split.Tensor,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
}
"""Operations that return a GatheredAsCodes: FSDP and module moves use them to make shards."""
