"""This package's layers in a Megatron-Core model: linears, norms, SwiGLU and core attention."""
