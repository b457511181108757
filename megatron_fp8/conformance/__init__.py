"""Conformance kit: golden codes and scales against which other libraries are checked.

    python -m megatron_fp8.conformance                 a row a case, a column a library that is installed
    python -m megatron_fp8.conformance --library mine:quantize

The golden file was written by NumPy code that shares nothing with this package (benchmarks/conformance.py).
docs/conformance.md defines its tensors.
"""

from .golden import Case, differences, load

__all__ = ["Case", "differences", "load"]
