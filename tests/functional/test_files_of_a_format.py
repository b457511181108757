"""Where `fp8_recipe` becomes codes: in which files what it says takes another shape.

    TransformerConfig -> Recipe -> Rule -> Cast (one of six) -> SitePlan -> Quantizer -> QuantizedSide

Traced are a config made from `fp8_format='mxfp8'`, the site of a linear that was built from it, and the site's first
cast. A shape is made in the file whose frame calls its class. Who only passes one on, checks it or asks it something
decides nothing of the codes; how many files are given one is held too. Of the kernels only the C of blocks is given one
(kernels/cpu/blocks.py, a Rule), the others numbers: all make the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch

from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.kernels.cpu import loops
from megatron_fp8.mcore.config.transformer_config import TransformerConfig
from megatron_fp8.numerics.rule import Rule
from megatron_fp8.plan import resolve, settings
from megatron_fp8.plan.operands import Cast
from megatron_fp8.plan.site_plan import SitePlan
from megatron_fp8.quantizer import Casts, Quantizer
from megatron_fp8.recipe import Recipe
from megatron_fp8.tensor import QuantizedSide
from tests.support.architecture import PACKAGE, walk

SHAPES = (TransformerConfig, Recipe, Rule, Cast, SitePlan, Quantizer, QuantizedSide)
WALK = walk("`fp8_recipe`")
"""Of each shape, in their order, the file that makes it."""

GIVEN_TO = 17
"""Files with a frame that is given one of the shapes, or the name itself, as an argument, whatever it does with it. Who
raises it makes the way longer."""


def traced() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """A rank case: shape -> files that make it; file -> functions that are given one."""
    from megatron_fp8.mcore.layers.linear import Fp8ColumnParallelLinear

    made: dict[str, set[str]] = {}
    given: dict[str, set[str]] = {}

    def note_in(found: dict[str, set[str]], frame: FrameType | None, key: str = "", value: str = "") -> None:
        path = Path(frame.f_code.co_filename) if frame is not None else Path()
        if path.is_relative_to(PACKAGE):
            file = str(path.relative_to(PACKAGE))
            found.setdefault(key or file, set()).add(value or file)

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code, itself = frame.f_code, frame.f_locals.get("self")
        for shape in SHAPES:
            if code.co_name == "__init__" and isinstance(itself, shape):
                note_in(made, frame.f_back, key=shape.__name__)
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
        handed = [x for x in arguments if x is not itself and not isinstance(x, TransformerConfig)]
        if any(isinstance(x, (*SHAPES, Casts)) or (isinstance(x, str) and x == "mxfp8") for x in handed):
            note_in(given, frame, value=code.co_name)

    with (
        model_parallel(Layout()),
        mock.patch.dict(settings._MADE, clear=True),
        mock.patch.dict(resolve._ALIKE, clear=True),  # as in a new process
    ):
        try:
            sys.setprofile(note)
            config = TransformerConfig(
                num_layers=1,
                hidden_size=64,
                num_attention_heads=4,
                fp8="e4m3",
                fp8_format="mxfp8",
                fp8_backend="emulated",
                bf16=True,
                params_dtype=torch.bfloat16,
                use_cpu_initialization=True,
            )
            sys.setprofile(None)
            linear = Fp8ColumnParallelLinear(
                128, 64, config=config, init_method=torch.nn.init.zeros_, bias=False, gather_output=False
            )
            sys.setprofile(note)
            row = linear.fp8_site.casts["input"].rowwise
            done = row(torch.randn(256, 128), "rowwise", record=True).rowwise
        finally:
            sys.setprofile(None)
    assert done.scale_inv.dtype == torch.float8_e8m0fnu and done.scale_inv.shape == (256, 4)
    return made, given


def test_seven_files_decide_what_the_codes_are(ranks: RankPool) -> None:
    ((made, given),) = ranks(1).run(traced)
    assert len(WALK) == len(SHAPES) == 7
    walked = WALK if loops.reason() is None else [*WALK[:-1], "backends/specified.py"]
    assert made == {shape.__name__: {file} for shape, file in zip(SHAPES, walked, strict=True)}
    assert len(given) <= GIVEN_TO, "\n".join(f"{file}: {sorted(names)}" for file, names in given.items())
