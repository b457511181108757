"""Runs quantizer factories for Transformer Engine without it: on classes with its quantizers' recorded parameters."""

from __future__ import annotations

import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron_fp8.numerics.formats import E2M1, E4M3, E5M2, ROLES
from megatron_fp8.numerics.rule import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_16X16,
    BLOCK_128X128,
    TENSOR,
    Rule,
)  # fmt: skip
from megatron_fp8.plan.cast_spec import READERS
from tests.support.te.signatures import recorded
from tests.support.te.standin import DType

Rules = dict[str, dict[str, Rule | None]]


def modules(version: str) -> dict[str, types.ModuleType]:
    """What a factory's file imports: name -> module. Classes take the version's recorded parameters and no other."""
    made = recorded()[version]["made"]
    tensor = types.ModuleType("transformer_engine.pytorch.tensor")
    for name, parameters in made.items():
        setattr(tensor, name, _quantizer_class(name, parameters))
    constants = types.ModuleType("transformer_engine.pytorch.constants")
    constants.DType = DType  # type: ignore[attr-defined]
    parents = ("transformer_engine", "transformer_engine.pytorch")
    return {module.__name__: module for module in (*map(types.ModuleType, parents), tensor, constants)}


def _quantizer_class(name: str, parameters: list[str]) -> type:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        unknown = set(given) - set(parameters)
        assert not unknown and len(args) + len(kwargs) == len(given), f"{name} does not take {unknown}"
        vars(self).update(given)

    return type(name, (), {"__init__": init})


def rules_of(qfactory: Callable[[Any], Any], linear: str, version: str) -> Rules:
    """GEMM -> role -> the rule by which a linear of that name reads the operand; the transform is left out where the
    rowwise side is read, which never has it."""
    found: Rules = {gemm: {} for gemm in ("fprop", "dgrad", "wgrad")}
    for role in ROLES:
        values = {"module_type": "linear", "tensor_type": role, "name": linear}
        assert list(values) == recorded()[version]["role"]
        quantizer = qfactory(SimpleNamespace(**values))
        sides = (quantizer, quantizer)
        if type(quantizer).__name__ == "HybridQuantizer":
            sides = quantizer.rowwise_quantizer, quantizer.columnwise_quantizer
            assert sides[0] is not sides[1], "Transformer Engine refuses one object for both sides"
        for gemm, side, columnwise in zip(READERS[role], sides, (False, True), strict=True):
            found[gemm][role] = _rule_of(side, columnwise=columnwise)
    return found


def _rule_of(quantizer: Any, *, columnwise: bool) -> Rule | None:
    kind, has = type(quantizer).__name__, vars(quantizer)
    if kind == "IdentityQuantizer":
        return None
    if kind == "NVFP4Quantizer":
        assert has["with_post_rht_amax"] == has["with_rht"]
        block = BLOCK_16X16 if has["with_2d_quantization"] else BLOCK_1X16
        transformed = has["with_rht"] and columnwise
        return Rule(E2M1, block, "e4m3", stochastic=has["stochastic_rounding"], hadamard=transformed)
    fmt = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2}[has["fp8_dtype"]]
    if kind == "MXFP8Quantizer":
        return Rule(fmt, BLOCK_1X32, "e8m0")
    scale: Any = "pow2" if has["force_pow_2_scales"] else "fp32"
    blocks = {1: BLOCK_1X128, 2: BLOCK_128X128}
    granularity = TENSOR if kind == "Float8CurrentScalingQuantizer" else blocks[has["block_scaling_dim"]]
    return Rule(fmt, granularity, scale, epsilon=has["amax_epsilon"])
