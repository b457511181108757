"""Initial weights that do not depend on the layout: tensor, pipeline or no parallelism start from one model.

Megatron-Core draws weights in the order in which each rank builds its layers, so other pipeline stages give another
model. Here every matrix is drawn whole, from a generator seeded by the run's seed and the matrix's global name, with
the deviation that Megatron-Core's config gives it, and each rank keeps its part.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

_OUTPUT_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")


@torch.no_grad()
def draw_weights(model: Any, config: Any, seed: int) -> None:
    """Set every matrix of `model` (this rank's stage, not wrapped yet); vectors keep their constants."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        name = _global_name(model, name)
        whole = torch.empty(_whole_shape(parameter), dtype=torch.float32, device="cpu")
        if "embedding" in name:
            draw = config.embedding_init_method
        else:
            projects_out = name.endswith(_OUTPUT_PROJECTIONS)
            draw = config.output_layer_init_method if projects_out else config.init_method
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            draw(whole)
        parameter.copy_(_own_part(whole, parameter))


def _global_name(model: Any, name: str) -> str:
    """The name in the whole model: layers numbered over all stages, a tied output layer as the embedding."""
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if layer is None:
        return name
    number = model.decoder.layers[int(layer[1])].layer_number - 1
    return f"decoder.layers.{number}.{name[layer.end() :]}"


def _whole_shape(parameter: Any) -> list[int]:
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= parallel_state.get_tensor_model_parallel_world_size()
    return shape


def _own_part(whole: Tensor, parameter: Any) -> Tensor:
    """This tensor-parallel rank's part; of a fused gate and up projection (stride 2) a part of each."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    dim = parameter.partition_dim
    fused = whole.chunk(parameter.partition_stride, dim)
    return torch.cat([part.chunk(size, dim)[rank] for part in fused], dim)
