"""Transformer Engine's layers in this package's plan and report."""
