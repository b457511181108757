"""Studies of FP8: number formats, comparisons of runs, benchmarks, the doctor."""
