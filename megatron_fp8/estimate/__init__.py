"""Estimates of a run from its config: parameters, memory, communication, time by a roofline."""
