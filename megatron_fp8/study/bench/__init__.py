"""FP8 against BF16 on this machine, cell by cell: what `megatron-fp8 bench` measures."""
