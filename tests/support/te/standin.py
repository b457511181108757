"""A Transformer Engine that runs on a CPU, put in the place of the real one: ``install('2.20.2')`` before Megatron-Core.

Recipes have the fields, defaults, repr and manners of the recorded version (signatures.json): keywords that it does not
know vanish, and what a quantizer reads is copied where TE copies it. Layers and contexts take the recorded parameters and
no other. A linear asks its quantizers, not the recipe, how to cast, and then runs this package's emulated GEMMs: so a
mapping that is wrong changes the loss.
"""

from __future__ import annotations

import enum
import importlib.machinery
import sys
import types
from collections.abc import Callable
from dataclasses import field, make_dataclass
from typing import Any

import torch

from tests.support.te.signatures import recorded


class Format(enum.Enum):
    """Transformer Engine's formats, by name."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


class DType(enum.Enum):
    """Its element types, as far as they are FP8."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class Manager:
    """FP8GlobalStateManager: the context in force, how often its outermost one was left, and what linears ran in FP8."""

    enabled, recipe, group, depth, updates, fp8_calls = False, None, None, 0, 0, 0
    entered: tuple[Any, ...] = ()

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return cls.recipe

    @classmethod
    def get_fp8_group(cls) -> Any:
        return cls.group


class _Autocast:
    """Its context: nested ones restore the outer; leaving the outermost enabled one updates delayed scaling."""

    def __init__(self, **kwargs: Any):
        self.enabled = kwargs.get("enabled", True)
        self.recipe, self.group = kwargs.get("recipe"), kwargs.get("amax_reduction_group")

    def __enter__(self) -> _Autocast:
        self.before = Manager.enabled, Manager.recipe, Manager.group
        Manager.enabled, Manager.recipe, Manager.group = self.enabled, self.recipe, self.group
        Manager.depth += 1
        Manager.entered += (repr(self.recipe),) if self.enabled else ()
        return self

    def __exit__(self, *error: Any) -> None:
        Manager.enabled, Manager.recipe, Manager.group = self.before
        Manager.depth -= 1
        Manager.updates += self.enabled and Manager.depth == 0


def _strict(names: list[str], call: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def check(kwargs: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(kwargs) - set(names))
        if unknown:
            raise TypeError(f"{call}() got unexpected keyword arguments {unknown}")
        return kwargs

    return check


# ------------------------------------------------------------------------------------------------------------- recipes


def recipe_module(version: str) -> types.ModuleType:
    """transformer_engine.common.recipe of that version."""
    known = recorded()[version]
    module = types.ModuleType("transformer_engine.common.recipe")
    module.Format = Format  # type: ignore[attr-defined]
    module.QParams = make_dataclass(  # type: ignore[attr-defined]
        "QParams",
        [(name, Any, field(default=0.0 if name == "amax_epsilon" else False)) for name in known["qparams"]],
        frozen=True,
    )
    module.MMParams = make_dataclass(  # type: ignore[attr-defined]
        "MMParams", [("use_split_accumulator", bool, field(default=True))], frozen=True
    )
    for name, shape in known["recipes"].items():
        setattr(module, name, _recipe_class(name, shape, module))
    module.NVFP4BlockScaling = module.CustomRecipe = type("Unused", (), {})  # type: ignore[attr-defined]
    return module


def _recipe_class(name: str, shape: dict[str, Any], module: types.ModuleType) -> type:
    defaults = {key: _value(value, module) for key, value in shape["fields"].items()}
    assert recorded_manners(), "pydantic's dataclasses drop unknown keywords: so does this"

    def init(self: Any, **kwargs: Any) -> None:
        for key, default in defaults.items():
            setattr(self, key, kwargs.get(key, default))

    def shown(self: Any) -> str:
        return f"recipe_type={name}, " + ", ".join(f"{key}={getattr(self, key)}" for key in shape["printed"])

    made = make_dataclass(
        name, [(key, Any) for key in defaults], init=False, repr=False, eq=True, namespace={"__init__": init}
    )
    made.__repr__ = shown  # type: ignore[method-assign]
    for key, value in shape["attributes"].items():
        setattr(made, key, _value(value, module))
    for kind in ("delayed", "mxfp8"):
        setattr(made, kind, classmethod(lambda cls, kind=kind: cls.__name__.lower().startswith(kind)))
    return made


def recorded_manners() -> bool:
    """Whether every recorded version swallows unknown keywords."""
    return all(known["swallows_unknown_keywords"] for known in recorded().values())


def _value(value: Any, module: types.ModuleType) -> Any:
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        return Format[inner] if kind == "Format" else getattr(module, kind)(**inner)
    return value


# -------------------------------------------------------------------------------------------------------------- layers


def _quantizers(recipe: Any, known: dict[str, Any]) -> dict[str, list[Any]]:
    """The quantizers of one linear, made as Transformer Engine makes them."""
    kinds = {
        "DelayedScaling": "Float8Quantizer",
        "Float8CurrentScaling": "Float8CurrentScalingQuantizer",
        "Float8BlockScaling": "Float8BlockQuantizer",
        "MXFP8BlockScaling": "MXFP8Quantizer",
    }
    base = next(c for c in type(recipe).__mro__ if c.__name__ in kinds)
    kind = kinds[base.__name__]
    made: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
    for key, source, dim in (
        ("scaling_fwd", "fp8_quant_fwd_inp", "x_block_scaling_dim"),
        ("scaling_fwd", "fp8_quant_fwd_weight", "w_block_scaling_dim"),
        ("scaling_bwd", "fp8_quant_bwd_grad", "grad_block_scaling_dim"),
    ):
        quantizer = type(kind, (), {})()
        wide = recipe.fp8_format is Format.HYBRID and key == "scaling_bwd"
        quantizer.dtype = DType.kFloat8E5M2 if wide else DType.kFloat8E4M3
        if hasattr(recipe, source):
            params = getattr(recipe, source)
            quantizer.force_pow_2_scales, quantizer.amax_epsilon = params.power_2_scale, params.amax_epsilon
        if hasattr(recipe, dim):
            quantizer.block_scaling_dim = getattr(recipe, dim)
        assert set(vars(quantizer)) <= {*known["quantizers"][kind], "force_pow_2_scales", "amax_epsilon"}
        made[key].append(quantizer)
    return made


def _rule_of(quantizer: Any) -> Any:
    """This package's rule for what a quantizer does."""
    from megatron_fp8.numerics.formats import E4M3, E5M2
    from megatron_fp8.recipe import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, TENSOR, Rule

    fmt = E5M2 if quantizer.dtype is DType.kFloat8E5M2 else E4M3
    if type(quantizer).__name__ == "MXFP8Quantizer":
        return Rule(fmt, BLOCK_1X32, "e8m0")
    granularity = TENSOR
    if type(quantizer).__name__ == "Float8BlockQuantizer":
        granularity = BLOCK_128X128 if quantizer.block_scaling_dim == 2 else BLOCK_1X128
    pow2 = getattr(quantizer, "force_pow_2_scales", False)
    return Rule(fmt, granularity, "pow2" if pow2 else "fp32", epsilon=getattr(quantizer, "amax_epsilon", 0.0))


class _Linear(torch.nn.Module):
    """What Linear and LayerNormLinear share. One tensor-parallel rank."""

    known: dict[str, Any]

    def _build(self, kwargs: dict[str, Any]) -> None:
        assert kwargs.get("tp_size", 1) == 1, "the stand-in has no tensor parallelism"
        self.in_features, self.out_features = kwargs["in_features"], kwargs["out_features"]
        self.use_bias, self.te_returns_bias = kwargs.get("bias", True), kwargs.get("return_bias", False)
        self.parallel_mode, self.tp_size, self.save_original_input = kwargs.get("parallel_mode"), 1, False
        dtype = kwargs.get("params_dtype") or torch.float32
        self.weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=dtype))
        (kwargs.get("init_method") or torch.nn.init.zeros_)(self.weight)
        self.weight.tensor_model_parallel = False
        self.bias = torch.nn.Parameter(torch.zeros(self.out_features, dtype=dtype)) if self.use_bias else None
        self.quantizers: dict[str, Any] = {"scaling_fwd": [], "scaling_bwd": []}
        self.fp8_meta: dict[str, Any] = {}
        self._emulated: Any = None

    def _multiply(self, x: torch.Tensor) -> Any:
        bias = None if self.te_returns_bias else self.bias
        if not Manager.enabled:
            out = torch.nn.functional.linear(x, self.weight, bias)
        else:
            out = self._fp8(x, bias)
        return (out, self.bias) if self.te_returns_bias else out

    def _fp8(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        from megatron_fp8.linear.function import fp8_linear
        from megatron_fp8.linear.gemm_site import GemmSite
        from megatron_fp8.plan.site_plan import fp8_site
        from megatron_fp8.recipe import CustomRecipe
        from megatron_fp8.state.fp8_state import Fp8State

        Manager.fp8_calls += 1
        if self._emulated is None:
            self.quantizers = _quantizers(Manager.recipe, self.known)
            length = getattr(Manager.recipe, "amax_history_len", 1)
            for key, number in (("scaling_fwd", 3), ("scaling_bwd", 2)):
                self.fp8_meta[key] = types.SimpleNamespace(amax_history=torch.zeros(length, number))
            roles = {
                "input": self.quantizers["scaling_fwd"][0],
                "weight": self.quantizers["scaling_fwd"][1],
                "grad_output": self.quantizers["scaling_bwd"][0],
            }
            rules = {role: _rule_of(quantizer) for role, quantizer in roles.items()}
            plan = fp8_site("standin", None, CustomRecipe(rules.__getitem__), "emulated", "stand-in")
            self._emulated = GemmSite(plan, Fp8State(torch.device("cpu")), None)
        return fp8_linear(x, self.weight, bias, self._emulated, fresh_weight=True)

    def get_extra_state(self) -> torch.Tensor:
        """A pickle, in the real one."""
        return torch.zeros(3, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Unpickles, in the real one."""
        raise AssertionError("a pickle was loaded from a checkpoint")


def _layers(version: str) -> dict[str, Any]:
    known = recorded()[version]
    calls = known["calls"]

    class Linear(_Linear):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__()
            self._build(_strict(calls["Linear"]["__init__"], "Linear")(kwargs))

        def forward(self, inp: torch.Tensor, **kwargs: Any) -> Any:
            _strict(calls["Linear"]["forward"], "Linear.forward")(kwargs)
            return self._multiply(inp)

    class LayerNormLinear(_Linear):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__()
            self._build(_strict(calls["LayerNormLinear"]["__init__"], "LayerNormLinear")(kwargs))
            self.eps, self.normalization = kwargs["eps"], kwargs["normalization"]
            dtype = kwargs["params_dtype"]
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(self.in_features, dtype=dtype))
            layer = self.normalization == "LayerNorm"
            self.layer_norm_bias = (
                torch.nn.Parameter(torch.zeros(self.in_features, dtype=dtype)) if layer else None
            )

        def forward(self, inp: torch.Tensor, **kwargs: Any) -> Any:
            _strict(calls["LayerNormLinear"]["forward"], "LayerNormLinear.forward")(kwargs)
            return self._multiply(_norm(inp, self.layer_norm_weight, self.layer_norm_bias, self.eps))

    for layer in (Linear, LayerNormLinear):
        layer.known, layer.__module__ = known, f"transformer_engine.pytorch.module.{layer.__name__.lower()}"
    return {"Linear": Linear, "LayerNormLinear": LayerNormLinear}


def _norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    from megatron_fp8.mcore.layers.norm import rms_norm

    if bias is None:
        return rms_norm(x, weight, eps)
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


class Norm(torch.nn.Module):
    """LayerNorm and RMSNorm of the real one."""

    has_bias = False

    def __init__(self, hidden_size: int, eps: float, params_dtype: torch.dtype, **kwargs: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=params_dtype))
        self.bias = (
            torch.nn.Parameter(torch.zeros(hidden_size, dtype=params_dtype)) if self.has_bias else None
        )
        self.weight.sequence_parallel = kwargs["sequence_parallel"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _norm(x, self.weight, self.bias, self.eps)


# -------------------------------------------------------------------------------------------------------------- package


_ROUTER = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")


def install(version: str) -> None:
    """Put the stand-in into this process: once, before anything imports Megatron-Core."""
    assert not any(name.startswith("megatron.") for name in sys.modules), (
        "too late: Megatron-Core looked already"
    )
    calls = recorded()[version]["calls"]
    layers, recipe = _layers(version), recipe_module(version)
    check = _strict(calls["autocast"].get("__init__", calls["autocast"].get("")), "autocast")

    def autocast(**kwargs: Any) -> _Autocast:
        return _Autocast(**check(kwargs))

    def available(return_reason: bool = False) -> Any:
        return (True, "") if return_reason else True

    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        """Recomputes inside the context that was in force, as the real one does."""
        from megatron.core.tensor_parallel import checkpoint as megatron_checkpoint

        Manager.entered += ("checkpoint",)
        around = {"enabled": Manager.enabled, "recipe": Manager.recipe, "amax_reduction_group": Manager.group}

        def inside(*inputs: Any) -> Any:
            with _Autocast(**around):
                return function(*inputs)

        return megatron_checkpoint(inside, kwargs["distribute_saved_activations"], *args)

    class RNGTracker:
        def reset(self) -> None: ...

    tensor = type("QuantizedTensor", (torch.Tensor,), {})
    unused = type("Unused", (torch.nn.Module,), {})
    ops = {"Sequential": unused, "FusibleOperation": unused}
    manager = {"FP8GlobalStateManager": Manager, "autocast": autocast, "fp8_autocast": autocast}
    modules = {
        "": {"__version__": version},
        "common": {},
        "pytorch": {
            **layers,
            **{f"is_{kind}_available": available for kind in ("fp8", "mxfp8", "fp8_block_scaling")},
            "LayerNorm": type("LayerNorm", (Norm,), {"has_bias": True}),
            "RMSNorm": type("RMSNorm", (Norm,), {}),
            "GroupedLinear": unused,
            "DotProductAttention": unused,
            "autocast": autocast,
        },
        "pytorch.ops": ops,
        "pytorch.router": dict.fromkeys(_ROUTER),
        "pytorch.fp8": manager,
        "pytorch.quantization": manager,
        "pytorch.distributed": {
            "CudaRNGStatesTracker": RNGTracker,
            "checkpoint": checkpoint,
            "activation_recompute_forward": checkpoint,
        },
        "pytorch.tensor": {"QuantizedTensor": tensor},
        "pytorch.tensor.mxfp8_tensor": {"MXFP8Tensor": tensor},
        "pytorch.tensor.utils": dict.fromkeys(
            ("replace_raw_data", "cast_master_weights_to_fp8", "post_all_gather_processing")
        ),
    }
    for name, contents in modules.items():
        _module(f"transformer_engine.{name}".rstrip("."), contents)
    sys.modules["transformer_engine.common.recipe"] = recipe
    sys.modules["transformer_engine.common"].recipe = recipe  # type: ignore[attr-defined]


def _module(name: str, contents: dict[str, Any]) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []  # type: ignore[attr-defined]
    vars(module).update(contents)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
