"""Initial weights independent of the parallel layout.

Megatron-Core draws weights in the order in which each rank builds its layers, so other pipeline stages give another
model, and expert parallel ranks draw the same experts. Here every matrix is drawn whole, from a generator seeded by the
run's seed and the matrix's global name, with the deviation that Megatron-Core's config gives it, and each rank keeps its
part.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from ..mcore.names import named_parameters

_OUTPUT_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")


@torch.no_grad()
def draw_weights(model: Any, config: Any, seed: int) -> None:
    """Set every matrix of `model` (this rank's stage, not wrapped yet); vectors keep their constants."""
    for name, parameter in named_parameters(model):
        if parameter.dim() < 2:
            continue
        group = _tensor_parallel_group(name)
        name = _drawn_as(model, name)
        whole = torch.empty(_whole_shape(parameter, group), dtype=torch.float32, device="cpu")
        if "embedding" in name:
            draw = config.embedding_init_method
        else:
            projects_out = name.endswith(_OUTPUT_PROJECTIONS)
            draw = config.output_layer_init_method if projects_out else config.init_method
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            draw(whole)
        parameter.copy_(_own_part(whole, parameter, group))


def _drawn_as(model: Any, name: str) -> str:
    """What seeds a parameter of this name in the whole model: a tied output layer is drawn as the embedding."""
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return name.replace(".experts.local_experts.", ".experts.")


def is_expert(name: str) -> bool:
    """Whether a parameter is one expert's, which other ranks share than those of other parameters."""
    return ".experts.local_experts." in name


def _tensor_parallel_group(name: str) -> Any:
    """The ranks that share a matrix, which is called ``name`` on this rank."""
    if is_expert(name):
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _whole_shape(parameter: Any, group: Any) -> list[int]:
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= group.size()
    return shape


def _own_part(whole: Tensor, parameter: Any, group: Any) -> Tensor:
    """This tensor-parallel rank's part; of a fused gate and up projection (stride 2) a part of each."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim = parameter.partition_dim
    fused = whole.chunk(parameter.partition_stride, dim)
    return torch.cat([part.chunk(group.size(), dim)[group.rank()] for part in fused], dim)
