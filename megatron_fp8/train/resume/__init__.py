"""Checkpoints of a run: which one it starts from, saves, and its folder."""
