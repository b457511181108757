"""A live model's weights under Hugging Face names, with the bytes of an export.

    from megatron_fp8.serve import weight_stream

    for name, tensor in weight_stream(chunks, "fp8-block"):
        engine.load(name, tensor)

No disk, and no second copy of the model: tensors are gathered in buckets, cast, and given away. The plan of names and
casts is an export's (huggingface/weight_plan.py). A tensor belongs to the consumer; the next one may be made after it is
dropped.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..huggingface import QUANTIZED_FORMATS
from ..huggingface.config import exported_architecture
from ..huggingface.directory import CONFIG, GENERATION, new_directory, write_json, write_tensors
from ..huggingface.formats import FORMATS, hf_quant_config, quantization_config
from ..huggingface.weight_plan import ExportOptions, WeightPlan
from ..inference.calibration import Calibration
from ..recipe import recipe_name
from .adapters import adapter_tensors
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
    kv_cache: bool = False,
    vocab_size: int | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterates over the tensors of an export of this model: (Hugging Face name, tensor), codes before scales.

    Active LoRA and DoRA adapters of PEFT are merged, in float32, before the cast; the model does not change. Weights that
    freeze_weights made codes are cast from what they mean, not from what BF16 rounds it to.

    Collective: all ranks iterate, to the end, between two iterations of training; each gets every tensor, on its own
    device. Equal to the bytes of `megatron-fp8 export` from a training checkpoint of the same moment.

    Args:
        model: a Megatron-Core model, or the list of its chunks, wrapped or not; or a model of transformers, with
            convert_to_fp8 or without, sharded by FSDP or not, with adapters or without.
        format: 'bf16' (the model's dtype), 'fp8-tensor', 'fp8-channel', 'fp8-block', 'mxfp8', 'nvfp4' or
            'nvfp4-modelopt', 'mxfp8-modelopt'. Or 'lora': the active adapter alone, under PEFT's names, which vLLM's and
            SGLang's loaders of adapters read beside ``model.peft_config[...].to_dict()`` (vLLM refuses DoRA and
            modules_to_save: stream those merged); the options have no effect.
        bucket_bytes: bytes of Megatron-Core's tensors that are gathered at a time.
        ignore: globs over Hugging Face names of linears to leave in high precision.
        quantize_all: quantize linears too that training keeps in BF16.
        calibration: input ranges, of this model or of a Megatron-Core model with its weights; static input scales follow
            the weights' scales.
        kv_cache: the calibration's scales of keys and values come last; only Megatron-Core's models measure them.
        vocab_size: rows of the vocabulary without Megatron-Core's padding; None: all rows.

    Raises ValueError, before the first tensor: an unknown format or family, a glob that matches nothing, or a tensor
    without counterpart; later: a tensor with NaN or Inf, or without whole blocks.
    """
    if format == "lora":
        return adapter_tensors(model)
    if format != "bf16" and format not in FORMATS:
        raise ValueError(
            f"format={format!r} is unknown: use one of {', '.join(('bf16', *QUANTIZED_FORMATS, 'lora'))}."
        )
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: a whole number of at least 1 is needed.")
    wanted = ExportOptions(
        FORMATS.get(format), tuple(ignore), not quantize_all, calibration=calibration, kv_cache=kv_cache
    )
    if not is_megatron(model):
        return _plan_of_converted(ConvertedSource(model), wanted, vocab_size).tensors()
    source = MegatronSource(list(model) if isinstance(model, (list, tuple)) else [model], bucket_bytes)
    rows = vocab_size or source.section["vocab_size"]
    return WeightPlan(source, wanted, exported_architecture(source.section), rows).tensors()


def _plan_of_converted(
    source: ConvertedSource, wanted: ExportOptions, vocab_size: int | None = None
) -> WeightPlan:
    """The plan of a model of transformers, with its own recipe where that is the format's."""
    recipe = None
    if wanted.calibration is not None:
        wanted = dataclasses.replace(wanted, calibration=source.calibration_of_gemms(wanted.calibration))
    if wanted.form is not None and source.recipe is not None:
        same = recipe_name(source.recipe) == recipe_name(wanted.form.recipe)
        recipe = source.recipe if same else None
    rows = vocab_size or source.section["vocab_size"]
    return WeightPlan(source, wanted, exported_architecture(source.section), rows, recipe)


def save_quantized(
    model: Any,
    directory: str | Path,
    format: str = "bf16",
    *,
    ignore: Iterable[str] = (),
    quantize_all: bool = False,
    calibration: Calibration | None = None,
) -> list[str]:
    """Write a model of transformers as a directory for transformers, vLLM and SGLang: a stream's tensors, config.json.

    Collective if the model is sharded; rank 0 writes. Not written is the tokenizer: ``tokenizer.save_pretrained(...)``.

    Args:
        model, format: as ``weight_stream``, without Megatron-Core's models (`megatron-fp8 export`) and 'lora'
            (``model.save_pretrained`` writes adapters).
        directory: a new or empty folder.
        ignore, quantize_all, calibration: as ``weight_stream``.

    Returns:
        Names of the tensor files.

    Raises ValueError as ``weight_stream``, for a directory with content, and for a model or format of the two kinds
    above; nothing is left then.
    """
    if is_megatron(model) or (format != "bf16" and format not in FORMATS):
        raise ValueError(
            f"save_quantized({type(model).__name__}, format={format!r}): a model of transformers and one of"
            f" {', '.join(('bf16', *QUANTIZED_FORMATS))} are needed; megatron-fp8 export writes Megatron-Core's"
            " checkpoints, and model.save_pretrained adapters."
        )
    source, form = ConvertedSource(model), FORMATS.get(format)
    plan = _plan_of_converted(source, ExportOptions(form, tuple(ignore), not quantize_all, calibration))
    if dist.is_initialized() and dist.get_rank() != 0:
        deque(plan.tensors(), maxlen=0)  # takes part in rank 0's gathers
        return []
    inner, tensors = source.model, plan.tensors()
    dtype = str(source.dtype).removeprefix("torch.")
    config = {**inner.config.to_dict(), "architectures": [source.family], "dtype": dtype}
    config.pop("quantization_config", None)
    try:
        with new_directory(Path(directory)) as folder:
            if form is not None:
                about = form, plan.ignored(), form.input_scale is not None and calibration is not None
                config["quantization_config"] = quantization_config(*about)
                if form.method == "modelopt":
                    write_json(folder / "hf_quant_config.json", hf_quant_config(*about))
            files = write_tensors(folder, tensors, _SHARD_BYTES)
            write_json(folder / CONFIG, config)
            if (generation := getattr(inner, "generation_config", None)) is not None:
                write_json(folder / GENERATION, generation.to_diff_dict())
    except BaseException:
        deque(tensors, maxlen=0)  # other ranks wait in its gathers
        raise
    return files


_SHARD_BYTES = 5_000_000_000


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
