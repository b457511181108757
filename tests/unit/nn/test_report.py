"""The report of a conversion: its table, and which share of the model runs in FP8."""

import torch
from torch import nn

from megatron_fp8.nn import convert_to_fp8


def test_report_fits_in_100_columns_and_says_each_reason_once():
    """Ranges of layers without one left out; what is too long is broken, and nothing of it lost."""

    def layers():
        return nn.ModuleList(nn.Sequential(nn.Linear(32, 32)) for _ in range(12))

    long = "a_name_without_a_dot_that_no_column_has_room_for_and_that_is_broken"
    model = nn.ModuleDict({"layers": layers(), "norm": nn.LayerNorm(32), long: layers()[:1]})
    report = convert_to_fp8(model, skip=lambda name, module: name == "layers.3.0").fp8_report
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    assert "layers.0.0 .. layers.11.0 (11)" in lines[1]  # one in between is left out
    assert [line.split()[0] for line in lines[2:4]] == ["layers.3.0", "norm"]
    for reason in {row.reason for row in report.rows}:
        assert " ".join(str(report).split()).count(reason) == 1
    assert f"{long}.0.0" in "".join(line.split("  ")[0].strip() for line in lines)
    assert "layers.0-11.0 (12)" in str(convert_to_fp8(nn.ModuleDict({"layers": layers()})).fp8_report)


def test_report_says_which_share_runs_in_fp8(capsys):
    """A count of modules can say anything: a few small linears of a model whose weights are elsewhere are 'most'."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.gain = nn.Parameter(torch.ones(4, 32, 64)), nn.Parameter(torch.ones(64))

    model = nn.Sequential()
    model.embed, model.up, model.experts = nn.Embedding(100, 64), nn.Linear(64, 128, bias=False), Experts()
    model.lstm, model.conv, model.head = nn.LSTM(64, 32), nn.Conv1d(64, 64, 3), nn.Linear(64, 100, bias=False)
    model.head.weight = model.embed.weight
    convert_to_fp8(model)
    report, fp8 = model.fp8_report, 64 * 128
    matrices = fp8 + 4 * 32 * 64 + 4 * 32 * (64 + 32) + 64 * 100
    assert report.weights_in_fp8 == fp8 / sum(p.numel() for p in model.parameters())
    assert report.flops_in_fp8 == fp8 / matrices
    assert (
        "1 of 6 modules with parameters run in FP8: 17 % of the weights, 23 % of the linears' FLOPs"
        in str(report)
    )
    assert (
        report.skipped["experts"]
        == "a stack of matrices stays in high precision, of experts whose forward is not known here: up [4, 32, 64]"
    )
    assert report.skipped["conv"] == "not a linear"
    # The module that runs in FP8 counts the weight.
    tied = convert_to_fp8(nn.Sequential(model.embed, model.head), skip=())
    assert tied.fp8_report.weights_in_fp8 == tied.fp8_report.flops_in_fp8 == 1


def test_what_the_shares_leave_out():
    """A linear without a shape, of which nothing can be said; a parametrization, whose layer counts."""
    model = convert_to_fp8(nn.Sequential(nn.LazyLinear(64), nn.Linear(64, 64)))
    assert (
        "100 % of the linears' FLOPs assuming one token per matrix, not counting what has no shape yet"
        in " ".join(str(model.fp8_report).split())
    )
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), nn.Linear(64, 64))
    assert convert_to_fp8(normed).fp8_report.flops_in_fp8 == 0.5
