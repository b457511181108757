"""Optimizers under Megatron-Core: Adam, compact moments, FP8 parameters, the gradient norm and loss scaling."""
