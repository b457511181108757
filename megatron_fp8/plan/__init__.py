"""What runs in which precision, and why: one entry a GEMM site, settled when the model is built; and who may switch off."""
