"""Fields about positions: what cannot be had is refused."""

import pytest

from megatron_fp8.train.config.model_section import ModelSection, transformer_config

DENSE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
LATENT = {**DENSE, "multi_latent_attention": True, "qk_pos_emb_head_dim": 8}


@pytest.mark.parametrize("fp8", [None, "hybrid"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({**LATENT, "position_embedding_type": "none"}, "model.position_embedding_type='none' with"),
        (
            {**LATENT, "rope_type": "rope", "rotary_percent": 0.1},
            "model.rope_type='rope', model.rotary_percent=0.1, model.qk_pos_emb_head_dim=8",
        ),
        ({**LATENT, "rotary_base": 1}, "model.rotary_base=1 must be"),
        ({**DENSE, "rotary_percent": 0.1}, "of 16 channels of a head (model.kv_channels) makes 1"),
    ],
)
def test_positions_that_cannot_be_had(fields, words, fp8):
    with pytest.raises(ValueError) as error:
        transformer_config(ModelSection(**fields, fp8=fp8))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_two_tables_of_positions_are_refused():
    """Megatron-Core trains that of the last stage apart from the first one's, and cannot save both."""
    two = {**DENSE, "mtp_num_layers": 1, "pipeline_model_parallel_size": 2}
    learned = {"position_embedding_type": "learned_absolute"}
    with pytest.raises(ValueError, match=r"a table of positions of its own.* Take 'rope'"):
        transformer_config(ModelSection(**two, **learned))
    transformer_config(ModelSection(**two))
    transformer_config(ModelSection(**{**two, "pipeline_model_parallel_size": 1}, **learned))
