"""Initial weights independent of the parallel layout.

Megatron-Core draws weights in the order in which each rank builds its layers. So another number of pipeline stages
gives another model, and expert-parallel ranks draw identical experts. Here every matrix is drawn in full, with the
standard deviation of Megatron-Core's config, from a generator seeded by the run's seed and the matrix's global name.
Each rank then copies its shard.
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
    """Initialise every matrix of `model` (this rank's stage, not wrapped yet); vectors keep their constants."""
    for name, parameter in named_parameters(model):
        if parameter.dim() < 2:
            continue
        group = _tensor_parallel_group(name)
        name = _seed_name(model, name)
        whole = torch.empty(_whole_shape(parameter, group), dtype=torch.float32, device="cpu")
        if "embedding" in name:
            draw = config.embedding_init_method
        else:
            projects_out = name.endswith(_OUTPUT_PROJECTIONS)
            draw = config.output_layer_init_method if projects_out else config.init_method
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            draw(whole)
        parameter.copy_(_shard(whole, parameter, group))


def _seed_name(model: Any, name: str) -> str:
    """The parameter name that seeds the generator: a tied output layer is drawn as the embedding."""
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return name.replace(".experts.local_experts.", ".experts.")


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to an expert. Experts use other parallel groups than the other parameters."""
    return ".experts.local_experts." in name


def _tensor_parallel_group(name: str) -> Any:
    """The tensor-parallel group of a matrix, named ``name`` on this rank."""
    if is_expert(name):
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _whole_shape(parameter: Any, group: Any) -> list[int]:
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= group.size()
    return shape


def _shard(whole: Tensor, parameter: Any, group: Any) -> Tensor:
    """This tensor-parallel rank's shard; of a fused gate and up projection (stride 2) a shard of each."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim = parameter.partition_dim
    fused = whole.chunk(parameter.partition_stride, dim)
    return torch.cat([part.chunk(group.size(), dim)[group.rank()] for part in fused], dim)
