"""Compiled loops over elements. Each equals torch operations elsewhere in the package bit for bit; none is required."""
