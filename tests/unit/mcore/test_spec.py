"""The object that Megatron-LM's --spec takes: there for as long as the hooks are, whichever was first."""

from __future__ import annotations

import pytest
from megatron.core.transformer.spec_utils import ModuleSpec, import_module

from benchmarks.support.ranks import RankPool

NAME = ("megatron_fp8.mcore.spec", "gpt_layer_fp8_spec")  # --spec's two words


def as_megatron_lm_imports_it() -> list[str]:
    from megatron_fp8 import mcore
    from megatron_fp8.mcore.layers.linear import Fp8ColumnParallelLinear

    said = []
    for _ in range(2):
        mcore.install()
        found = import_module(NAME)
        assert isinstance(found, ModuleSpec)
        assert found.submodules.mlp.submodules.linear_fc1 is Fp8ColumnParallelLinear
        mcore.uninstall()
        with pytest.raises(KeyError) as error:
            import_module(NAME)
        said.append(str(error.value))
    mcore.install()
    return said


def test_spec_finds_it(ranks: RankPool):
    assert ranks(1).run(as_megatron_lm_imports_it) == [[repr(NAME[1])] * 2]
