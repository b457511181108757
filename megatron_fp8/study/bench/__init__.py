"""Benchmarks of FP8 against BF16 on this machine, for `megatron-fp8 bench`."""
