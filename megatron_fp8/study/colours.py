"""Colours of formats and recipes, the same in every picture.

Eight colours that people with any kind of colour vision can distinguish (Okabe and Ito 2008); high precision
is grey or black.
"""

from __future__ import annotations

FORMATS = {
    "e4m3": "#0072b2",
    "e5m2": "#d55e00",
    "e2m1": "#cc79a7",
    "e8m0": "#009e73",
    "bf16": "#404040",
    "fp16": "#999999",
}

RECIPES = {
    "bf16": "#404040",
    "delayed": "#e69f00",
    "tensorwise": "#d55e00",
    "rowwise": "#cc79a7",
    "blockwise": "#0072b2",
    "mxfp8": "#009e73",
    "custom": "#56b4e9",
}
"""'bf16' stands for the model's dtype without FP8."""
