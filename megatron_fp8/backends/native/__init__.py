"""The native backend for NVIDIA GPUs: probe, operand layout, products."""
