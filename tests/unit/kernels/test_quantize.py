"""Quantizing kernels against the emulated backend: every byte of codes and scales, amax and counts."""

from dataclasses import replace

import pytest
import torch

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8.backends import emulated
from megatron_fp8.backends.native.placement import tiles_of
from megatron_fp8.kernels.quantize import (
    Record,
    measure,
    quantize_blocks,
    quantize_rows,
    quantize_tensor,
    write_matrix,
)
from megatron_fp8.kernels.tiles import StoredMatrix, Tile
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaling import compute_scale_inv
from megatron_fp8.recipe import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Rule
from tests.support.matrices import DEVICE, DTYPES, SHAPES, assert_quantized, assert_recorded, mixed, strided

BLOCKS = {
    "1x128": (BLOCK_1X128, "pow2"),
    "1x128-fp32": (BLOCK_1X128, "fp32"),
    "128x128": (BLOCK_128X128, "pow2"),
    "128x128-fp32": (BLOCK_128X128, "fp32"),
    "mx": (BLOCK_1X32, "e8m0"),
}
SCALES = [3.0, 2.0**-20, 2.0**127, 3.4028234663852886e38]


def inputs(shape):
    """Of the largest shape a matrix of each dtype, one of them finite; of others two, with dtypes in turn."""
    at, count = SHAPES.index(shape), 3 if shape == max(SHAPES) else 2
    for dtype, special in [(DTYPES[(at + i) % 3], i > 0) for i in range(count)]:
        yield f"{shape} {dtype} special={special}", mixed(shape, dtype, special)


def blocks(x, name, fmt, direction="both", **options):
    granularity, kind = BLOCKS[name]
    return quantize_blocks(
        x, fmt, direction, block=granularity.cols, square=granularity.symmetric, kind=kind, **options
    )


@pytest.fixture
def filled_with_nan():
    """Memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name, shape):
    granularity, kind = BLOCKS[name]
    for i, (what, x) in enumerate(inputs(shape)):
        fmt = (E4M3, E5M2)[i % 2]
        record = Record.new(DEVICE)
        sides = blocks(x, name, fmt, record=record)
        expected = emulated.quantize(x, Rule(fmt, granularity, kind), "both")
        assert_quantized(sides, expected, f"{name} {fmt.name} {what}")
        assert_recorded(record, expected, what)


@pytest.mark.parametrize("name", ["1x128", "mx", "128x128"])
def test_blocks_of_one_direction_and_tile(name):
    granularity, kind = BLOCKS[name]
    x = mixed((130, 200), torch.bfloat16, special=True)
    tile = None if granularity.symmetric else Tile(256, 128, 4)
    for direction in ("rowwise", "columnwise"):
        sides = blocks(x, name, E4M3, direction, tile=tile)
        expected = emulated.quantize(x, Rule(E4M3, granularity, kind), direction)
        assert_quantized(sides, expected, f"{name} {direction}")


TILED = ("mx", "1x128", "128x128")


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_in_tiles(shape, name):
    """Scales as the MX product reads them, to the ends of their tiles; codes, amax and count do not depend on it."""
    granularity, kind = BLOCKS[name]
    for what, x in inputs(shape):
        plain = emulated.quantize(x, Rule(E4M3, granularity, kind), "both")
        record = Record.new(DEVICE)
        sides = blocks(x, name, E4M3, tiled=True, record=record)
        for way in ("rowwise", "columnwise"):
            mine, theirs = getattr(sides, way), getattr(plain.tensor, way)
            assert_same_bytes(mine.codes, theirs.codes, f"{what} {way} codes")
            assert_same_bytes(mine.scale_inv, tiles_of(theirs), f"{what} {way} scales")
        assert_recorded(record, plain, what)


@pytest.mark.parametrize("name", TILED)
def test_scales_in_tiles_of_one_direction(name):
    """More than one tile each way; what reads them in their logical layout finds them."""
    granularity, kind = BLOCKS[name]
    x = mixed((300, 260), torch.bfloat16, special=True)
    plain = emulated.quantize(x, Rule(E4M3, granularity, kind), "both")
    for way in ("rowwise", "columnwise"):
        side, theirs = getattr(blocks(x, name, E4M3, way, tiled=True), way), getattr(plain.tensor, way)
        assert_same_bytes(side.codes, theirs.codes, f"{way} codes")
        assert_same_bytes(side.scale_inv, tiles_of(theirs), f"{way} scales")
        tiled = replace(theirs, scale_inv=side.scale_inv, tiled=True)
        assert_same_bytes(tiled.plain().scale_inv, theirs.scale_inv, f"{way} scales again")


def test_margin_and_epsilon():
    x = mixed((33, 129), torch.float32)
    for kind in ("fp32", "pow2"):
        rule = Rule(E4M3, BLOCK_1X128, kind, margin=3, epsilon=1e-3)
        sides = quantize_blocks(x, E4M3, block=128, kind=kind, margin=3, epsilon=1e-3)
        assert_quantized(sides, emulated.quantize(x, rule, "both"), kind)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_given_scale(shape):
    """Delayed scaling: Inf and NaN saturate and are counted, whatever the scale."""
    for i, (what, x) in enumerate(inputs(shape), SHAPES.index(shape)):
        fmt = (E4M3, E5M2)[i // 2 % 2]
        scale = torch.tensor(SCALES[i % 4], device=DEVICE)
        record = Record.new(DEVICE)
        sides = quantize_tensor(x, fmt, scale=scale, record=record)
        expected = emulated.quantize(x, Rule(fmt, TENSOR, delayed=True), "both", scale=scale)
        assert_quantized(sides, expected, f"{fmt.name} scale {float(scale)} {what}")
        assert_recorded(record, expected, what)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensorwise(shape):
    for i, (what, x) in enumerate(inputs(shape), SHAPES.index(shape)):
        fmt = (E4M3, E5M2)[i // 2 % 2]
        kind = ("fp32", "pow2")[i % 2]
        record = Record.new(DEVICE)
        assert measure(x, record=record) == (None, None)
        sides = quantize_tensor(x, fmt, amax=record.amax, pow2=kind == "pow2")
        expected = emulated.quantize(x, Rule(fmt, TENSOR, kind), "both")
        assert_quantized(sides, expected, f"{fmt.name} {kind} {what}")
        assert_recorded(record, expected, what)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rowwise(shape):
    for i, (what, x) in enumerate(inputs(shape)):
        fmt = (E4M3, E5M2)[i % 2]
        record = Record.new(DEVICE)
        row_amax, col_amax = measure(x, rows=True, cols=True, record=record)
        sides = quantize_rows(x, fmt, row_amax, col_amax)
        expected = emulated.quantize(x, Rule(fmt, ROW, "pow2"), "both")
        assert_quantized(sides, expected, f"{fmt.name} {what}")
        assert_recorded(record, expected, what)


def test_one_direction():
    x = mixed((130, 70), torch.bfloat16)
    scale = torch.tensor(0.5, device=DEVICE)
    row_amax, col_amax = measure(x, rows=True, cols=True)
    for direction in ("rowwise", "columnwise"):
        sides = quantize_tensor(x, E4M3, direction, scale=scale)
        expected = emulated.quantize(x, Rule(E4M3, TENSOR), direction, scale=scale)
        assert_quantized(sides, expected, direction)
        rows = direction == "rowwise"
        sides = quantize_rows(x, E4M3, row_amax if rows else None, None if rows else col_amax)
        expected = emulated.quantize(x, Rule(E4M3, ROW, "pow2"), direction)
        assert_quantized(sides, expected, f"per row {direction}")


CASTS = {
    "given": lambda x, **o: quantize_tensor(x, E4M3, scale=torch.tensor(3.0, device=DEVICE), **o),
    "tensorwise": lambda x, **o: quantize_tensor(x, E5M2, amax=torch.tensor(9.0, device=DEVICE), **o),
    "rowwise": lambda x, **o: quantize_rows(x, E4M3, *measure(x, rows=True, cols=True), **o),
    "1x128": lambda x, **o: blocks(x, "1x128", E4M3, **o),
    "128x128": lambda x, **o: blocks(x, "128x128", E4M3, **o),
    "mx": lambda x, **o: blocks(x, "mx", E4M3, **o),
    "mx in tiles": lambda x, **o: blocks(x, "mx", E5M2, tiled=True, **o),
}


@pytest.mark.parametrize("name", CASTS)
def test_zeros_behind_the_last_row(name, filled_with_nan):
    """Columnwise codes reach to whole blocks; all else is as without them, and rows that are whole get none."""
    pad_to = 128 if "128" in name else 32 if "mx" in name else 16
    for i, rows in enumerate((1, pad_to - 1, pad_to, pad_to + 1)):
        x = mixed((rows, 70), DTYPES[i % 3], special=True)  # NaN and Inf in the last row
        plain, found = CASTS[name](x), CASTS[name](x, pad_to=pad_to)
        codes, length = found.columnwise.codes, -(-rows // pad_to) * pad_to
        assert codes.shape == (70, length) and codes.is_contiguous()
        assert_same_bytes(codes[:, :rows], plain.columnwise.codes, f"{rows} codes")
        assert not codes[:, rows:].view(torch.uint8).any(), f"{rows}: not zeros"
        assert_same_bytes(found.columnwise.scale_inv, plain.columnwise.scale_inv, f"{rows} scales")
        assert_all_same_bytes(found.rowwise, plain.rowwise, f"{rows} rowwise")


def test_of_no_rows_there_is_nothing_to_fill():
    x = torch.empty(0, 5, dtype=torch.bfloat16, device=DEVICE)
    for name in ("given", "1x128", "mx in tiles"):
        assert CASTS[name](x, pad_to=32).columnwise.codes.shape == (5, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows_and_columns(dtype):
    """Rows apart from each other are read where they are; a transposed matrix is copied first."""
    x = mixed((65, 130), dtype, special=True)
    for view in (strided(x), x.t().contiguous().t()):
        assert not view.is_contiguous()
        expected = emulated.quantize(x, Rule(E4M3, BLOCK_1X128, "pow2"), "both")
        assert_quantized(blocks(view, "1x128", E4M3), expected, "strided blocks")
        scale = torch.tensor(2.5, device=DEVICE)
        expected = emulated.quantize(x, Rule(E4M3, TENSOR), "both", scale=scale)
        assert_quantized(quantize_tensor(view, E4M3, scale=scale), expected, "strided tensor")


def test_records_add_up():
    """A slot holds the largest amax and the sum of counts of all casts of an iteration."""
    arena = torch.zeros(2, 5, device=DEVICE)
    record = Record(arena[0, 3], arena[1, 3])
    for seed in range(2):
        x = mixed((40, 40), torch.float32, special=False, seed=seed)
        x[seed, 5:7] = float("nan")
        quantize_tensor(x, E4M3, scale=torch.ones((), device=DEVICE), record=record)
        measure(x, record=record)
    assert float(arena[1, 3]) == 8 and float(arena[0, 3]) > 0
    assert float(arena[0, 3]) == max(
        float(emulated.quantize(mixed((40, 40), torch.float32, seed=s), Rule(E4M3, TENSOR), "rowwise").amax)
        for s in range(2)
    )
    arena[:, 3] = 0
    assert not arena.any(), "a cast wrote beside its slot"


def test_an_amax_of_its_own_and_the_running_one():
    """A scale is made from one matrix's amax; its slot keeps the largest of all."""
    running = torch.zeros(3, device=DEVICE)
    small, large = (torch.full((4, 70), size, device=DEVICE) for size in (2.0, 3.0))
    large[1, 2] = torch.nan
    for x, known in ((large, 3), (small, 3)):
        record = Record(torch.zeros((), device=DEVICE), running[2], running[1])
        measure(x, record=record)
        assert float(record.amax) == float(x.nan_to_num(0).max()) and float(running[1]) == known
    assert running.tolist() == [0, 3, 1]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_empty(shape):
    x = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    record = Record.new(DEVICE)
    row_amax, col_amax = measure(x, rows=True, cols=True, record=record)
    scale = torch.tensor(3.0, device=DEVICE)
    found = {
        (ROW, "pow2"): quantize_rows(x, E4M3, row_amax, col_amax),
        (TENSOR, "fp32"): quantize_tensor(x, E4M3, amax=record.amax, record=record),
        (BLOCK_1X128, "pow2"): blocks(x, "1x128", E4M3),
        (BLOCK_128X128, "pow2"): blocks(x, "128x128", E4M3),
        (BLOCK_1X32, "e8m0"): blocks(x, "mx", E4M3),
    }
    for (granularity, kind), sides in found.items():
        assert_quantized(sides, emulated.quantize(x, Rule(E4M3, granularity, kind), "both"), str(granularity))
    assert float(record.amax) == 0 and float(record.nonfinite) == 0
    sides = quantize_tensor(x, E4M3, scale=scale)
    assert_same_bytes(sides.rowwise.scale_inv, compute_scale_inv(scale))


def test_layouts_of_scales():
    """What torch's blockwise scaled product asks for, and zeros in the padding."""
    x = mixed((300, 200), torch.bfloat16)
    whole = sides = blocks(x, "1x128", E4M3)
    assert sides.rowwise.scale_inv.shape == (300, 2) and sides.rowwise.scale_inv.stride() == (1, 300)
    assert sides.columnwise.scale_inv.shape == (200, 3) and sides.columnwise.scale_inv.stride() == (1, 200)
    for room in (1, 4):
        sides = blocks(x[:299], "1x128", E4M3, room=room)
        assert sides.rowwise.scale_inv.stride() == (1, 299 + room // 4)
        assert sides.rowwise.codes.untyped_storage().nbytes() == (299 + room // 4) * 200
        assert_same_bytes(sides.rowwise.scale_inv.contiguous(), whole.rowwise.scale_inv[:299].contiguous())
    sides = blocks(x, "128x128", E4M3)
    assert sides.rowwise.scale_inv.shape == (3, 2) and sides.rowwise.scale_inv.stride() == (4, 1)
    assert sides.columnwise.scale_inv.shape == (2, 3) and sides.columnwise.scale_inv.stride() == (4, 1)
    padded = sides.rowwise.scale_inv.as_strided((3, 4), (4, 1))
    assert not padded[:, 2:].any() and padded[:, :2].all()
    sides = blocks(x, "mx", E4M3)
    assert sides.rowwise.scale_inv.is_contiguous() and sides.rowwise.scale_inv.shape == (300, 7)


def test_values():
    """The matrix back."""
    x = mixed((40, 130), torch.bfloat16)
    assert_same_bytes(write_matrix(StoredMatrix(x)), x)


def test_errors():
    x = torch.zeros(4, 4, device=DEVICE)
    with pytest.raises(ValueError, match=r"tensor of dtype torch\.float64"):
        measure(x.double())
    with pytest.raises(ValueError, match=r"got shape \(4,\): flatten it"):
        measure(x[0])
    with pytest.raises(ValueError, match="direction 'sideways' is unknown"):
        quantize_tensor(x, E4M3, "sideways", amax=x[0, 0])
    with pytest.raises(ValueError, match="tile 64 x 64 does not hold whole blocks of 128"):
        quantize_blocks(x, E4M3, block=128, tile=Tile(64, 64, 4))
    with pytest.raises(ValueError, match=r"side or stride of 2\^24 or more"):
        measure(torch.zeros(1, 1, device=DEVICE).expand(1 << 24, 1))
