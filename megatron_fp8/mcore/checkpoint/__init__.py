"""Checkpoints of Megatron-Core models in training. docs/checkpoints.md shows the calls."""

from .loader import load
from .training_state import layout_facts, numbers, sharded_state

__all__ = ["layout_facts", "load", "numbers", "sharded_state"]
