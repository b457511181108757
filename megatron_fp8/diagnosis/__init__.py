"""Diagnosis: what FP8 costs a model and where, and advice from a run's records."""
