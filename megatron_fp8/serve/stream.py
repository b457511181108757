"""A live model's weights under Hugging Face names, with the bytes of an export.

    from megatron_fp8.serve import weight_stream

    for name, tensor in weight_stream(chunks, "fp8-block"):
        engine.load(name, tensor)

No disk, and no second copy of the model: tensors are gathered in buckets, cast, and given away. The plan of names and
casts is an export's (huggingface/weight_plan.py). A tensor belongs to the consumer; the next one may be made after it is
dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..huggingface import QUANTIZED_FORMATS
from ..huggingface.config import exported_architecture
from ..huggingface.formats import FORMATS
from ..huggingface.weight_plan import Wanted, WeightPlan
from ..inference.calibration import Calibration
from ..recipe import recipe_name
from .sources import ConvertedSource, MegatronSource

BUCKET_BYTES = 512 * 2**20
"""Default size of a bucket."""


def weight_stream(
    model: Any,
    format: str = "bf16",
    bucket_bytes: int = BUCKET_BYTES,
    *,
    ignore: Iterable[str] = (),
    quantize_all: bool = False,
    calibration: Calibration | None = None,
    vocab_size: int | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterates over the tensors of an export of this model: (Hugging Face name, tensor), codes before scales.

    Collective: all ranks iterate, to the end, between two iterations of training; each gets every tensor, on its own
    device. Equal to the bytes of `megatron-fp8 export` from a training checkpoint of the same moment.

    Args:
        model: a Megatron-Core model, or the list of its chunks, wrapped or not; or a model of transformers, with
            convert_to_fp8 or without, sharded by FSDP or not.
        format: 'bf16' (the model's dtype), 'fp8-tensor', 'fp8-channel', 'fp8-block', 'mxfp8', 'nvfp4' or
            'nvfp4-modelopt', 'mxfp8-modelopt'.
        bucket_bytes: bytes of Megatron-Core's tensors that are gathered at a time.
        ignore: globs over Hugging Face names of linears to leave in high precision.
        quantize_all: quantize linears too that training keeps in BF16.
        calibration: input ranges; static input scales follow the weights' scales.
        vocab_size: rows of the vocabulary without Megatron-Core's padding; None: all rows.

    Raises ValueError, before the first tensor: an unknown format or family, a glob that matches nothing, or a tensor
    without counterpart; later: a tensor with NaN or Inf, or without whole blocks.
    """
    if format != "bf16" and format not in FORMATS:
        raise ValueError(
            f"format={format!r} is unknown: use one of {', '.join(('bf16', *QUANTIZED_FORMATS))}."
        )
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: a whole number of at least 1 is needed.")
    form = FORMATS.get(format)
    wanted = Wanted(form, tuple(ignore), follow_training=not quantize_all, calibration=calibration)
    recipe = None
    if is_megatron(model):
        source: Any = MegatronSource(
            list(model) if isinstance(model, (list, tuple)) else [model], bucket_bytes
        )
    else:
        source = ConvertedSource(model)
        if form is not None and source.recipe is not None:
            same = recipe_name(source.recipe) == recipe_name(form.recipe)
            recipe = source.recipe if same else None
    rows = vocab_size or source.section["vocab_size"]
    return WeightPlan(source, wanted, exported_architecture(source.section), rows, recipe).tensors()


def is_megatron(model: Any) -> bool:
    """Whether this is a Megatron-Core model or a list of its chunks."""
    inner = model[0] if isinstance(model, (list, tuple)) and model else model
    while hasattr(inner, "module"):
        inner = inner.module
    return any(base.__module__.startswith("megatron.core.") for base in type(inner).__mro__)


class HfWeights:
    """The objects from which verl, NeMo-RL and slime take weights, under the names that they call.

    verl: `bridge.export_weights(models)` (mbridge) and `bridge.export_hf_weights(models)`; NeMo-RL and others:
    Megatron-Bridge's `export_hf_weights(models, cpu=..., show_progress=...)`; slime: `get_hf_weight_chunks(weights)`.
    Read in their sources on 2026-11-28, and not run with them.

    Args:
        format, bucket_bytes, options: of ``weight_stream``.
        model: for slime, whose iterators are made with the model.
    """

    def __init__(
        self,
        format: str = "bf16",
        bucket_bytes: int = BUCKET_BYTES,
        *,
        model: Any = None,
        **options: Any,
    ) -> None:
        self._format, self._bucket_bytes, self._options = format, bucket_bytes, options
        self._model = model

    def export_weights(self, models: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """mbridge's: (name, tensor) of these chunks."""
        return weight_stream(models, self._format, self._bucket_bytes, **self._options)

    def export_hf_weights(
        self, model: Any, cpu: bool = False, show_progress: bool = False, conversion_tasks: Any = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Megatron-Bridge's: (name, tensor), on the CPU if asked. Raises ValueError for a part of the model only."""
        if conversion_tasks is not None:
            raise ValueError(
                "conversion_tasks are Megatron-Bridge's: this stream has a plan of its own; give None."
            )
        stream = self.export_weights(model)
        return ((name, tensor.cpu()) for name, tensor in stream) if cpu else stream

    def get_hf_weight_chunks(
        self, megatron_local_weights: Any, progress_desc: str = "", param_info_buckets: Any = None
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """slime's: lists of (name, tensor) of about ``bucket_bytes``, of the model given at construction.

        Args:
            megatron_local_weights, progress_desc: not used; weights are read from the model.

        Raises ValueError: no model was given, or a part of the model is asked for.
        """
        if self._model is None or param_info_buckets is not None:
            raise ValueError(
                "give HfWeights(model=...), and no param_info_buckets: whole models are streamed."
            )
        chunk: list[tuple[str, torch.Tensor]] = []
        total = 0
        for name, tensor in self.export_weights(self._model):
            if chunk and total + tensor.nbytes > self._bucket_bytes:
                yield chunk
                chunk, total = [], 0
            chunk.append((name, tensor))
            total += tensor.nbytes
        if chunk:
            yield chunk
