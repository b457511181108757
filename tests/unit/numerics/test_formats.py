"""All 256 codes of every format against ml_dtypes, gfloat and the table in docs/numerics.md."""

import copy
import dataclasses
import pickle

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.formats import format_info_ocp_e4m3, format_info_ocp_e5m2, format_info_ocp_e8m0

from benchmarks.support import reference
from megatron_fp8.kernels.cast_dispatch import decode
from megatron_fp8.numerics.formats import E4M3, E5M2, E8M0

ELEMENTS = [
    pytest.param(E4M3, reference.E4M3, ml_dtypes.float8_e4m3fn, format_info_ocp_e4m3, id="e4m3"),
    pytest.param(E5M2, reference.E5M2, ml_dtypes.float8_e5m2, format_info_ocp_e5m2, id="e5m2"),
]
ALL_CODES = torch.arange(256, dtype=torch.uint8)
TABLE = [
    # format, dtype, exponent bits, mantissa bits, bias, max, has Inf
    (E4M3, torch.float8_e4m3fn, 4, 3, 7, 448.0, False),
    (E5M2, torch.float8_e5m2, 5, 2, 15, 57344.0, True),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0].name)
def test_table(row):
    fmt, dtype, exponent, mantissa, bias, largest, has_inf = row
    assert (fmt.dtype, fmt.exponent_bits, fmt.mantissa_bits, fmt.bias) == (dtype, exponent, mantissa, bias)
    assert (fmt.max, fmt.has_inf) == (largest, has_inf)
    with pytest.raises(AttributeError):
        fmt.bias = 8


def test_e8m0_is_a_scale_format():
    assert (E8M0.dtype, E8M0.exponent_bits, E8M0.mantissa_bits) == (torch.float8_e8m0fnu, 8, 0)
    assert (E8M0.bias, E8M0.max, E8M0.has_inf) == (127, 2.0**127, False)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E8M0], ids=lambda fmt: fmt.name)
def test_copies_are_the_format_itself(fmt):
    """Code asks `fmt is E5M2`: a recipe's copy, or one that another process sent, has to mean the same."""
    for copied in (copy.copy(fmt), copy.deepcopy([fmt])[0], pickle.loads(pickle.dumps(fmt))):
        assert copied is fmt
    other = dataclasses.replace(fmt, max=1.0)
    assert copy.deepcopy(other) == other != fmt and pickle.loads(pickle.dumps(other)) == other


@pytest.mark.parametrize("fmt, spec, ml_dtype, info", ELEMENTS)
def test_reference_agrees_with_ml_dtypes_and_gfloat(fmt, spec, ml_dtype, info):
    """The oracle of this suite is itself checked against two libraries."""
    ours = spec.values()
    theirs = ALL_CODES.numpy().view(ml_dtype).astype(np.float64)
    assert np.array_equal(ours, theirs, equal_nan=True)
    number = ~np.isnan(ours)
    assert np.array_equal(np.signbit(ours)[number], np.signbit(theirs)[number])
    decoded = np.array([gfloat.decode_float(info, code).fval for code in range(256)])
    assert np.array_equal(ours, decoded, equal_nan=True)
    assert (info.max, info.bias, info.num_infs > 0) == (fmt.max, fmt.bias, fmt.has_inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("fmt, spec, ml_dtype, info", ELEMENTS)
def test_decode_every_code(fmt, spec, ml_dtype, info, dtype):
    """Every code decodes to its exact value: -0 stays -0, NaN stays NaN, Inf stays Inf."""
    actual = decode(ALL_CODES.view(fmt.dtype), dtype)
    expected = spec.values()
    assert actual.dtype is dtype
    back = actual.double().numpy()
    bad = np.flatnonzero(~((back == expected) | (np.isnan(back) & np.isnan(expected))))
    assert bad.size == 0, f"code 0x{bad[0]:02x} decodes to {back[bad[0]]}, expected {expected[bad[0]]}"
    finite = ~np.isnan(expected)
    assert np.array_equal(np.signbit(back)[finite], np.signbit(expected)[finite])


@pytest.mark.parametrize("shape", [(0,), (0, 5), (1,), (), (3, 7, 5), (1, 1001)], ids=str)
def test_decode_any_shape(shape):
    codes = torch.randint(0, 0x7C, shape, dtype=torch.uint8)
    actual = decode(codes.view(torch.float8_e4m3fn), torch.bfloat16)
    assert actual.shape == shape
    assert np.array_equal(actual.double().numpy(), reference.E4M3.values()[codes.numpy()])


def test_decode_reads_through_strides():
    codes = ALL_CODES.reshape(16, 16).t()
    actual = decode(codes.view(torch.float8_e5m2))
    assert actual.dtype is torch.float32
    expected = reference.E5M2.values()[codes.numpy()]
    assert np.array_equal(actual.double().numpy(), expected, equal_nan=True)


def test_e8m0_codes_are_powers_of_two():
    """Code k is 2^(k - 127), 0xFF is NaN; the same in gfloat."""
    values = reference.e8m0_value(np.arange(255, dtype=np.uint8))
    assert values[127] == 1.0 and values[254] == E8M0.max and values[0] == 2.0**-127
    decoded = [gfloat.decode_float(format_info_ocp_e8m0, code).fval for code in range(256)]
    assert np.array_equal(values, decoded[:255]) and np.isnan(decoded[255])
    torch_values = ALL_CODES.view(torch.float8_e8m0fnu).float().double().numpy()
    assert np.array_equal(values, torch_values[:255]) and np.isnan(torch_values[255])
