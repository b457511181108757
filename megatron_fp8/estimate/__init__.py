"""Estimates a run from its config: parameters, memory, communication, roofline time."""
