"""The output projection in FP8 (`fp8_output_layer`): a language model's `output_layer` as a GEMM site.

No spec names this linear: a model makes it itself, of Megatron-Core's class, and then sets it up together with the
embedding to which it may be tied. There it is replaced, with its weight.

    tied      weight is the embedding's, passed with each call; codes are made of it, and lookups read its BF16 values
    untied    weight is the layer's own

Either way the weight stays BF16 (fp8_param skips it): two pipeline stages hold copies of a tied one, and both must
step alike.

Rejected: replacing the class in the module that makes the layer. That module takes it from Megatron-Core's
`tensor_parallel` package, which every other model uses too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from .linear import Fp8ColumnParallelLinear


class Fp8OutputLayer(Fp8ColumnParallelLinear):
    """A vocabulary-parallel output projection, y [s, b, V / tp] = x [s, b, hidden] @ weight^T, as a GEMM site.

    Args:
        plain: Megatron-Core's layer, whose parameters it uses.
        embedding: returns the embedding's weight [V / tp, hidden], for a ``plain`` without a weight.
    """

    def __init__(self, plain: ColumnParallelLinear, embedding: Callable[[], torch.Tensor]):
        super().__init__(
            plain.input_size,
            plain.output_size,
            config=plain.config,
            init_method=plain.config.init_method,
            bias=False,
            gather_output=plain.gather_output,
            skip_bias_add=plain.skip_bias_add,
            skip_weight_param_allocation=True,
            tp_group=plain.tp_group,
        )
        self.weight, self.bias = plain.weight, plain.bias
        self._embedding = embedding

    @property
    def tied_weight(self) -> torch.Tensor:
        """The embedding's weight, which this layer uses if it has none of its own."""
        return self._embedding()


def output_layer_in_fp8(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wraps LanguageModule.setup_embeddings_and_output_layer: with fp8_output_layer the output layer becomes an FP8
    site.

    ValueError: its class is not Megatron-Core's.
    """

    @functools.wraps(original)
    def setup_embeddings_and_output_layer(self: Any) -> None:
        original(self)
        config = self.config
        if not (self.post_process and config.fp8 and getattr(config, "fp8_output_layer", False)):
            return
        if type(self.output_layer) is not ColumnParallelLinear:
            raise ValueError(
                f"fp8_output_layer=True: {type(self).__name__}'s output_layer is a {type(self.output_layer).__name__},"
                " whose own forward runs in BF16. Make it a ColumnParallelLinear, or set fp8_output_layer=False"
            )
        self.output_layer = Fp8OutputLayer(self.output_layer, self.shared_embedding_or_output_weight)

    return setup_embeddings_and_output_layer
