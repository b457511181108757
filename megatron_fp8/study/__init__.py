"""Studies of FP8: number formats, comparisons of runs, benchmarks, the doctor."""


class StudyFailed(RuntimeError):
    """A benchmark or a comparison failed; another attempt may succeed."""
