"""Weights that live as FP8: the tensor subclass that buffers, optimizers and checkpoints take for a BF16 parameter."""
