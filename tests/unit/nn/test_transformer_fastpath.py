"""torch's encoder goes past its linears in evaluation: not where they were converted, and again when converted back."""

import copy
import pickle

import pytest
import torch
from torch import nn

from megatron_fp8.nn import convert_from_fp8, convert_to_fp8

LAYER = {"d_model": 64, "nhead": 4, "dim_feedforward": 128, "dropout": 0.0, "batch_first": True}


def test_attention_modules_of_torch():
    """MultiheadAttention and the encoder layer's inference kernel read weights of linears that they never call."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(**LAYER)
    convert_to_fp8(layer)
    assert layer.fp8_report.converted == ["linear1", "linear2"]
    assert "never calls it" in layer.fp8_report.skipped["self_attn.out_proj"]
    x = torch.randn(2, 8, 64)
    with torch.no_grad():
        trained, evaluated = layer.train()(x), layer.eval()(x)
    convert_from_fp8(layer)
    with torch.no_grad():
        plain = layer(x)
    # Attention has another kernel in evaluation, so bits differ; the distance to high precision does not.
    assert (evaluated - trained).norm() < 0.05 * (plain - trained).norm()
    assert not layer.linear1._forward_pre_hooks


@pytest.mark.parametrize("how", ["itself", "deepcopy", "pickle"])
def test_padded_batches_of_torchs_encoder(how):
    """In evaluation the encoder would hand its layers nested tensors, of which FP8 knows nothing."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER), 2)
    plain = set(vars(encoder))
    convert_to_fp8(encoder)
    convert_to_fp8(encoder)  # a second time changes nothing
    if how != "itself":
        encoder = copy.deepcopy(encoder) if how == "deepcopy" else pickle.loads(pickle.dumps(encoder))
    x, padding = torch.randn(2, 8, 64), torch.arange(8).expand(2, 8) > 5
    with torch.no_grad():
        trained, evaluated = (encoder.train(mode)(x, src_key_padding_mask=padding) for mode in (True, False))
    kept = ~padding
    assert (evaluated - trained)[kept].norm() < 0.01 * trained[kept].norm()
    convert_from_fp8(encoder)
    assert encoder.use_nested_tensor is True and set(vars(encoder)) == plain
    assert not any(module._forward_pre_hooks for module in encoder.modules())


def test_an_encoder_that_used_no_nested_tensors_uses_none_afterwards():
    layer = nn.TransformerEncoderLayer(**LAYER)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert not convert_from_fp8(convert_to_fp8(encoder)).use_nested_tensor
