"""The kept digests that GPUs are checked with: made by today's emulated backend, met by the kernels, and sharp."""

from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_digests
from tests.support.matrices import DEVICE

CPU = torch.device("cpu")


def test_kept_digests_are_the_emulated_backends():
    found = gpu_digests.run(gpu_digests.emulated_functions(), CPU)
    assert found == gpu_digests.kept(), "python -m benchmarks.gpu_digests --write"


def chosen(cases):
    """One size of every recipe, and all that has no size."""
    return [
        case
        for case in cases
        if not case.large
        and ("200x129" in case.name or "/" not in case.name or case.name.startswith(("norm", "update")))
    ]


def test_kernels_meet_them(monkeypatch):
    some = chosen(gpu_digests.cases())
    assert len(some) > 20
    monkeypatch.setattr(gpu_digests, "cases", lambda: some)
    functions = gpu_digests.kernel_functions()
    found = gpu_digests.run(functions, DEVICE)
    assert gpu_digests.compare(found, gpu_digests.kept(), functions, DEVICE) == []


def test_a_difference_is_named(monkeypatch):
    """One code wrong, one result of another shape, a case nobody kept."""
    some = chosen(gpu_digests.cases())
    monkeypatch.setattr(gpu_digests, "cases", lambda: some)
    functions = gpu_digests.emulated_functions()

    def wrong(x, rule, direction, **kwargs):
        made = functions.quantize(x, rule, direction, **kwargs)
        if x.shape == (200, 129):
            made.tensor.rowwise.codes.view(torch.uint8)[150, 7] ^= 0x81
        return made

    broken = replace(functions, quantize=wrong, transpose=lambda codes: codes.t()[:-1])
    found = gpu_digests.run(broken, CPU)
    expected = gpu_digests.kept()
    del expected["norm/e4m3"]
    lines = gpu_digests.compare(found, expected, broken, CPU)
    named = {line.partition(" ")[0]: line for line in lines}
    assert set(named) == {n for n in found if "200x129" in n} | {"transpose", "norm/e4m3:"}
    assert (
        "rowwise.codes: 1 of 25800 elements differ, first at (150, 7): 0x"
        in named["rowwise/e4m3/200x129-bfloat16"]
    )
    assert "transpose codes: (256, 300), expected shape (257, 300)" in named["transpose"]
    assert "no digest is kept" in named["norm/e4m3:"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_inputs_hold_every_kind_of_number(dtype):
    x = gpu_digests.matrix(1, 200, 129, dtype, True)
    assert x.isnan().any() and (x == torch.inf).any() and (x == -torch.inf).any()
    zero = x[x == 0]
    assert zero.signbit().any() and not zero.signbit().all()
    if dtype != torch.float16:  # float32's subnormals round to zero there
        assert ((x != 0) & (x.abs() < torch.finfo(dtype).tiny)).any()
    assert gpu_digests.matrix(1, 200, 129, dtype, False).isfinite().all()
