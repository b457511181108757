"""A stand-in for Transformer Engine, made of what real versions were recorded to have."""
