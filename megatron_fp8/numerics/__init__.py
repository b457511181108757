"""The specification: formats, casts and scales, bit for bit as docs/numerics.md says. Plain torch, no dispatch inside."""
