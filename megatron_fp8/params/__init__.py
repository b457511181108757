"""FP8 parameters: tensor subclasses in the place of BF16 parameters."""
