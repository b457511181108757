"""Formats and scaling as tables and pictures, for `megatron-fp8 formats`."""
