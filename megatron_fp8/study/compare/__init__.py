"""Recipes against high precision on one model, data, seeds and layout: what `megatron-fp8 compare` does."""
