"""The precision plan: one entry a GEMM site, made with the model."""
