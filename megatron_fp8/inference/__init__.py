"""FP8 inference: weights quantized once, any number of tokens, static or dynamic scales."""

from .batch_invariant import make_batch_invariant
from .model_size import model_bytes, storage_bytes, tensors_of
from .prepare import InferenceReport, PreparedSite, prepare_for_inference
from .sampling import Sampler

__all__ = [
    "InferenceReport",
    "PreparedSite",
    "Sampler",
    "make_batch_invariant",
    "model_bytes",
    "prepare_for_inference",
    "storage_bytes",
    "tensors_of",
]
