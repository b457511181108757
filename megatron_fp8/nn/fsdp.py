"""FP8 all-gather for fully_shard (FSDP2): a byte a value on the wire.

fully_shard keeps a weight as shards and gathers it before use. With a weight of this class the shard is quantised first,
with the scale of the whole weight, so the gathered codes are those of the gathered weight, bit for bit: casting before or
after the network is the same arithmetic. What the linear gets is an Fp8Parameter over FSDP's own buffer, which FSDP frees
after the forward and fills again for the backward; no rank holds the codes of all weights in between.

The scale of a whole weight needs its largest magnitude over all ranks. When the weights have changed, the first one that
is gathered shares those of all in one all-reduce. Delayed scaling knows its scales, and needs none.

Codes that serve one direction only (per row, 1x32) cannot be turned into the other's: those weights travel in high
precision and are quantised after the gather, and so do 128x128 blocks that a shard's boundary would cut.

Rejected: to gather scales with the codes, one per rank. The gathered weight would have a scale per shard, and neither its
numbers nor its columnwise side would be those of the recipe.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from ..files.say import say
from ..numerics.scaling import compute_amax
from ..params.fp8_parameter import Fp8Parameter
from ..quantizer import Quantizer
from .find import fp8_linears
from .group import Fp8Group
from .linear import Fp8Linear

aten = torch.ops.aten


def enable_fp8_all_gather(model: torch.nn.Module) -> list[str]:
    """Make fully_shard gather this model's FP8 weights as codes. Call it after convert_to_fp8 and before fully_shard.

        model = convert_to_fp8(model)
        enable_fp8_all_gather(model)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = ...                        # after fully_shard, as always

    Returns:
        Names of the linears whose weights will travel as codes; the others' recipes need both directions from high
        precision (rowwise, mxfp8), or leave the weight unquantised, or they are Conv1Ds, experts or parametrised. The
        number is also printed.

    Raises:
        ValueError: the model has no FP8 linear, is sharded already, or none of its weights can travel as codes.
    """
    made: dict[int, torch.nn.Parameter] = {}
    names = []
    linears = fp8_linears(model)
    for name, linear in linears.items():
        if not isinstance(linear, Fp8Linear):
            continue
        weight = linear.held
        if weight is None:  # it is computed, and what travels is what it is computed from
            continue
        if hasattr(weight, "to_local"):
            raise ValueError(
                f"{name}.weight is sharded already: call enable_fp8_all_gather before fully_shard"
            )
        rule = linear.fp8_config.resolved_recipe.rule("weight")
        both_ways = rule is not None and rule.granularity.symmetric  # one set of codes serves both directions
        if not both_ways or "weight" in linear.fp8_config.unquantized:
            continue
        if id(weight) not in made:
            value = weight.detach()
            made[id(weight)] = torch.nn.Parameter(GatheredAsCodes(value), requires_grad=weight.requires_grad)
        names.append(name)
    if not names:
        raise ValueError(
            "no weight of this model can travel as FP8 codes: its recipe quantises each direction from high precision, or"
            " not at all; use tensorwise, delayed or blockwise, or fully_shard without enable_fp8_all_gather"
        )
    for module in model.modules():  # wherever a weight is, tied ones included
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[key] = made[id(parameter)]
    say(
        f"megatron_fp8: fully_shard will gather {len(names)} of {len(linears)} FP8 weights as codes",
        to="stdout",
    )
    return names


def disable_fp8_all_gather(model: torch.nn.Module) -> None:
    """Undo ``enable_fp8_all_gather`` in a model that was not sharded: weights are ordinary parameters again."""
    made: dict[int, torch.nn.Parameter] = {}
    parameter: Any
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if isinstance(parameter, GatheredAsCodes):
                plain = torch.nn.Parameter(parameter._value, requires_grad=parameter.requires_grad)
                module._parameters[key] = made.setdefault(id(parameter), plain)


class _Cast(NamedTuple):
    """What a rank knows of the gathered weight without being sent it."""

    quantizer: Quantizer
    outer_size: torch.Size
    scale_inv: torch.Tensor | None  # None: it travels
    amax: torch.Tensor
    nonfinite: torch.Tensor


class GatheredAsCodes(torch.Tensor):
    """A weight or a shard of one, in high precision, that fully_shard gathers as FP8 codes.

    It behaves as the tensor it holds: optimizers, state dicts and pickles see ordinary numbers.
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
        if func not in _KEPT:
            return out
        wrapped = tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, out)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_value"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> GatheredAsCodes:
        return GatheredAsCodes(inner["_value"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the tensor it holds: a file needs no class of this package to be read."""
        return self._value.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredAsCodes({self._value!r})"

    # ------------------------------------------------------------------------------------- what fully_shard calls

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: torch.nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], _Cast | None]:
        """(what this rank sends: codes as bytes, and block scales; what it knows without being sent)."""
        assert isinstance(module, Fp8Linear)
        _refuse_smaller_mesh(module.fp8_group)
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
        # A group of one gathers nothing, and fully_shard then copies the first tensor alone.
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
        # A kernel's scales lie as the product wants them, with padding between rows; what travels is flat.
        return (codes, side.scale_inv.contiguous()) if scales_travel else (codes,), known

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        known: _Cast | None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """The gathered weight over FSDP's buffer; with ``out``, the one made before over the same buffer, renewed."""
        if known is None:
            return None if out is not None else (outputs[0], ())
        scale_inv = outputs[1].clone() if known.scale_inv is None else known.scale_inv
        if out is not None:
            assert isinstance(out, Fp8Parameter)
            out.set_scales([scale_inv], known.amax, known.nonfinite)
            return None
        codes = outputs[0][: known.outer_size[0]]
        gathered = _Gathered.of_codes(
            known.quantizer, param_dtype, codes, scale_inv, known.amax, known.nonfinite
        )
        return gathered, ()

    def _whole_amax(self, fp8_group: Fp8Group, ranks: Any, dtype: torch.dtype) -> torch.Tensor:
        """float32 [], the amax of the whole weight; shared for all weights that changed, in one all-reduce."""
        weight_generation = fp8_group.state(self._value.device).weight_generation
        if self._amax is None or self._amax[0] != (weight_generation, self._value._version):
            # Not to_local(): it gives another tensor object each time, and the amax is kept by this one.
            local = [getattr(linear.held, "_local_tensor", None) for linear in fp8_group.linears]
            stale = {id(s): s for s in local if isinstance(s, GatheredAsCodes) and s.device == self.device}
            shards = list({**stale, id(self): self}.values())
            amaxes = torch.stack([compute_amax(shard._value.to(dtype)) for shard in shards])
            dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=ranks)
            fp8_group.state(self._value.device).counts.scaling_collectives += 1
            for shard, amax in zip(shards, amaxes.unbind(), strict=True):
                shard._amax = ((weight_generation, shard._value._version), amax)
        assert self._amax is not None
        return self._amax[1]


_looked_at: weakref.WeakSet[Fp8Group] = weakref.WeakSet()


def _refuse_smaller_mesh(fp8_group: Fp8Group) -> None:
    """ValueError, before a model's first forward, if fully_shard would keep a weight on fewer ranks after a forward: the
    backward would gather it from there, which torch has not got for weights that bring their own gather."""
    if fp8_group in _looked_at:
        return
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    for module in list(_module_state_mapping):
        if not isinstance(module, FSDPModule):
            continue
        for shards in _parameter_groups(module):
            own = any(
                isinstance(one._sharded_local_tensor, GatheredAsCodes)
                and getattr(one._module_info.module, "fp8_group", None) is fp8_group
                for one in shards.fsdp_params
            )
            if own and shards._use_post_forward_mesh:
                raise ValueError(
                    "fully_shard(reshard_after_forward=NUMBER) does not go together with enable_fp8_all_gather: use True"
                    " (the default) or False, or fully_shard without enable_fp8_all_gather"
                )
    _looked_at.add(fp8_group)


def _parameter_groups(module: Any) -> list[Any]:
    """torch's groups of parameters that one call of fully_shard gathers; up to torch 2.11 there is one, or None."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


class _Gathered(Fp8Parameter):
    """What FSDP puts into the module while it is gathered."""

    is_gathered = True

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.as_strided.default and list(args[1]) == list(args[0].shape):
            return args[0].alias()  # FSDP gives a gathered tensor its shape, which it has
        return super().__torch_dispatch__(func, types, args, kwargs)


def _padded(value: torch.Tensor, rows: int) -> torch.Tensor:
    """The shard [own rows, cols] as [rows, cols], with zeros below: FSDP gathers shards of one size."""
    return torch.nn.functional.pad(value, (0, 0, 0, rows - value.shape[0]))


def _whole_blocks(quantizer: Quantizer, outer_size: torch.Size, world: int) -> bool:
    rows = quantizer.rule.granularity.rows
    return rows == 0 or outer_size[0] % (rows * world) == 0


_KEPT = {
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
"""Operations whose result is gathered as codes too: those with which FSDP, and a module that moves, make shards."""
