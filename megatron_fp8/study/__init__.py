"""Studies of FP8: formats, comparisons of runs, benchmarks, the doctor."""
