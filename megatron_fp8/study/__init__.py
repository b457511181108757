"""What is learned about FP8 without a run of one's own, or from several: formats, comparisons of runs, timings here."""
