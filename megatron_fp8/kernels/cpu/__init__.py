"""Compiled C for CPUs: the casts' inner loops and a BF16 GEMM, built once by the machine's own compiler."""
