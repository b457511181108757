"""Drawn calls of one query's attention (decode_attention.c), and sums in float64 that they have to be near."""

from __future__ import annotations

import torch

from megatron_fp8.kernels.cpu.decode_attention import Cache

from . import numbers as of
from .elementwise import empty, named
from .numbers import Draw
from .tape import Buffer, Call

DTYPES = {name: of.DTYPES[name] for name in ("float32", "bfloat16")}


def attention_call(draw: Draw, most: int) -> Call:
    """Scores of keys, or sums of values: rows lie apart in their memory, of which nothing behind the last may be read."""
    dtype_name, dtype = named(DTYPES, draw)
    tokens, width = of.size(draw, most, 1), of.size(draw, most // 2, 1)
    sequences, groups, heads = (int(draw.integers(1, n)) for n in (4, 4, 7))
    apart = width + int(draw.integers(3))
    memory = torch.randn(tokens * sequences * groups * apart, generator=of.seeded(draw)).to(dtype)
    steps = (sequences * groups * apart, groups * apart, apart)
    rows = memory.as_strided((tokens, sequences, groups, width), (*steps, 1))
    memory = memory[: memory.numel() - (apart - width)].contiguous()
    values = rows.double()
    cache = Cache(None, *steps, tokens, sequences, groups, heads, width)
    told = Buffer(cache)
    told.pointers[Cache.rows.offset] = Buffer(memory)
    scores = bool(draw.integers(2))
    shape = (sequences, groups * heads, width if scores else tokens)
    given = torch.randn(shape, generator=of.seeded(draw))
    split = given.double().view(sequences, groups, heads, -1)
    product, sizes = (
        torch.einsum("tsgw,sghw->sght" if scores else "tsgw,sght->sghw", x, y).flatten(1, 2)
        for x, y in ((values, split), (values.abs(), split.abs()))
    )

    def check(_: int, outs: list[bytearray]) -> str | None:
        found = torch.frombuffer(outs[0], dtype=torch.float32).view(product.shape).double()
        wrong = ~((found - product).abs() <= 1e-5 * sizes)
        return f"{int(wrong.sum())} of {wrong.numel()} sums are wrong" if bool(wrong.any()) else None

    return Call(
        f"{dtype_name}_{'scores' if scores else 'values'}",
        [told, Buffer(given), empty(tuple(product.shape), torch.float32), int(draw.integers(1, 4))],
        check,
        f"{tokens} tokens, {sequences} sequences, {groups} groups of {heads} heads, {width} wide",
    )
