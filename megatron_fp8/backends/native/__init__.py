"""NVIDIA GPUs: what this machine multiplies (probe), what the product must be given (layout), and both as a backend."""
