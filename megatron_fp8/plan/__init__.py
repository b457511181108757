"""What runs in which precision, and why: one entry a GEMM site, made when the model is built; who may switch off."""
