"""C kernels for CPUs: casts and a BF16 GEMM, compiled on this machine."""
