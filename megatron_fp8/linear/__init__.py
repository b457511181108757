"""The linear layer: a GEMM site's three products, what is saved between them, and what tensor parallelism sends."""
