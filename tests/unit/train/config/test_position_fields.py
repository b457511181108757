"""Fields about positions: what cannot be had is refused."""

import pytest

from megatron_fp8.train.config.model_section import ModelSection, transformer_config

DENSE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
LATENT = {**DENSE, "multi_latent_attention": True, "qk_pos_emb_head_dim": 8}


@pytest.mark.parametrize("fp8", [None, "hybrid"])
def test_latent_attention_without_positions_is_refused(fp8):
    with pytest.raises(ValueError, match=r"model\.position_embedding_type='none' with"):
        transformer_config(ModelSection(**LATENT, position_embedding_type="none", fp8=fp8))


def test_two_tables_of_positions_are_refused():
    """Megatron-Core trains that of the last stage apart from the first one's, and cannot save both."""
    two = {**DENSE, "mtp_num_layers": 1, "pipeline_model_parallel_size": 2}
    learned = {"position_embedding_type": "learned_absolute"}
    with pytest.raises(ValueError, match=r"a table of positions of its own.* Take 'rope'"):
        transformer_config(ModelSection(**two, **learned))
    transformer_config(ModelSection(**two))
    transformer_config(ModelSection(**{**two, "pipeline_model_parallel_size": 1}, **learned))
