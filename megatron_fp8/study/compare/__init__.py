"""Compares recipes with high precision on one model, for `megatron-fp8 compare`."""
