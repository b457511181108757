"""torch's scaled matrix product as cuBLASLt would have it: strict about every layout, computed in float64.

The rules are written down a second time here, from NVIDIA's and PyTorch's documentation, so that a layout which
layout.py plans wrongly does not pass because the test asked layout.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

F8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass
class FakeTorch:
    """Replaces its products; counts them by kind, and refuses kinds with the message given for them."""

    calls: Counter[str] = field(default_factory=Counter)
    refuse: dict[str, str] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    wrong: str = ""
    turned: bool = False
    """Whether products with one scale take transposed codes, as Blackwell's."""

    def scaled_mm(
        self,
        a,
        b,
        scale_a,
        scale_b,
        bias=None,
        scale_result=None,
        out_dtype=None,
        use_fast_accum=False,
        out=None,
        suffix=" v1",
    ):
        assert scale_result is None
        _readable(a, b, scale_a, scale_b, bias)
        (m, k), n = a.shape, b.shape[1]
        if scale_a.dtype == torch.float8_e8m0fnu:
            kind = "mx"
            assert k % 32 == 0, f"K {k} is no multiple of MX's 32"
            assert scale_b.dtype == scale_a.dtype and not use_fast_accum
            first, second = unswizzle(scale_a, m, k), unswizzle(scale_b, n, k)
        elif scale_a.numel() == scale_b.numel() == 1:
            kind = "tensor"
            first, second = scale_a.reshape(1, 1).double(), scale_b.reshape(1, 1).double()
        elif scale_a.shape[1] > 1:
            kind, first, second = self._blocks_by_shape(a, b, scale_a, scale_b)
            assert not use_fast_accum
        else:
            kind = "row"
            assert scale_a.shape == (m, 1) and scale_a.stride() == (1, 1), (scale_a.shape, scale_a.stride())
            assert scale_b.shape == (1, n) and scale_b.stride() == (n, 1), (scale_b.shape, scale_b.stride())
            first, second = scale_a.double(), scale_b.double().t()
        kind = kind if kind.startswith("block") else kind + suffix
        return self._product(kind, a, b, first, second, bias, out_dtype, use_fast_accum, out)

    def _blocks_by_shape(self, a, b, scale_a, scale_b):
        """Blocks of 128 as _scaled_mm finds them: 128x128 scales without the padding that cuBLASLt reads."""
        (m, k), n = a.shape, b.shape[1]
        assert m % 4 == 0, f"M {m} is no multiple of 4"
        first = self._vector_blocks(scale_a, m, k)
        if scale_b.shape == (ceil(k, 128), n):
            return "block 1d v1", first, self._vector_blocks(scale_b.t(), n, k)
        assert k % 512 == 0, f"scales of {k // 128} blocks of K are not padded: wrong numbers"
        assert scale_b.shape == (k // 128, ceil(n, 128)) and scale_b.stride() == (1, k // 128)
        return "block v1", first, _square_blocks(scale_b, n, k)

    def scaled_mm_v2(
        self,
        a,
        b,
        scale_a,
        recipe_a,
        swizzle_a,
        scale_b,
        recipe_b,
        swizzle_b,
        bias,
        out_dtype,
        dims,
        fast,
        out=None,
    ):
        _readable(a, b, scale_a[0], scale_b[0], bias)
        if a.dtype == b.dtype == torch.float4_e2m1fn_x2:
            assert dims == [] and not fast
            ways = (recipe_a, swizzle_a), (recipe_b, swizzle_b)
            return self._four_bits(a, b, scale_a, scale_b, ways, bias, out_dtype, out)
        (scale_a,), (scale_b,) = scale_a, scale_b
        assert swizzle_a == swizzle_b and dims == []
        from torch.nn.functional import ScalingType, SwizzleType

        names = tuple(ScalingType(r[0]).name for r in (recipe_a, recipe_b))
        scalars = scale_a.numel() == scale_b.numel() == 1
        if not a.dtype == b.dtype == torch.float8_e4m3fn and names[0] not in ("TensorWise", "RowWise"):
            # check_deepseek_recipe and check_mxfp8_recipe in ScaledBlasUtils.cpp
            raise ValueError("Invalid scaling configuration")
        if names == ("BlockWise1x32", "BlockWise1x32"):
            assert [SwizzleType(s).name for s in swizzle_a] == ["SWIZZLE_32_4_4"]
            assert scale_a.dtype == torch.float8_e8m0fnu
        else:
            assert swizzle_a == [] and scale_a.dtype == scale_b.dtype == torch.float32
        if names[0] in ("TensorWise", "RowWise", "BlockWise1x32"):
            assert names[0] == names[1] and scalars == (names[0] == "TensorWise")
            return self.scaled_mm(a, b, scale_a, scale_b, bias, None, out_dtype, fast, out, suffix="")
        assert not fast
        (m, k), n = a.shape, b.shape[1]
        assert m % 4 == 0, f"M {m} is no multiple of 4"
        first = self._vector_blocks(scale_a, m, k)
        if names == ("BlockWise1x128", "BlockWise1x128"):
            kind, second = "block 1d", self._vector_blocks(scale_b, n, k)
        else:
            assert names == ("BlockWise1x128", "BlockWise128x128"), names
            kind, tall = "block", 4 * ceil(ceil(k, 128), 4)
            assert scale_b.shape == (tall, ceil(n, 128)) and scale_b.stride() == (1, tall), scale_b.stride()
            second = _square_blocks(scale_b, n, k)
        return self._product(kind, a, b, first, second, bias, out_dtype, False, out)

    def _four_bits(self, a, b, scale_a, scale_b, ways, bias, out_dtype, out):
        """NVFP4 in two levels: E4M3 in tiles, and a float32 each, of which the product is alpha."""
        from torch.nn.functional import ScalingType, SwizzleType

        for recipes, swizzles in ways:
            assert [ScalingType(r).name for r in recipes] == ["BlockWise1x16", "TensorWise"]
            assert [SwizzleType(s).name for s in swizzles] == ["SWIZZLE_32_4_4", "NO_SWIZZLE"]
        (m, packed), n = a.shape, b.shape[1]
        assert packed % 16 == 0 and n % 16 == 0, f"rows of {packed} bytes, {n} columns"
        assert a.stride() == (packed, 1) and b.shape[0] == packed and b.stride() == (1, packed)
        sides = []
        for codes, rows, (tiles, factor) in ((a, m, scale_a), (b.t(), n, scale_b)):
            assert tiles.dtype == torch.float8_e4m3fn
            assert factor.dtype == torch.float32 and factor.numel() == 1 and factor.device == codes.device
            byte = unswizzled(tiles, rows, packed // 8)
            sides.append(of_four_bits(codes) * byte.view(tiles.dtype).double().repeat_interleave(16, 1))
        alpha = scale_a[1] * scale_b[1]
        product = sides[0] @ sides[1].t() * alpha.double()
        return self._finish("fp4", product, bias, out_dtype, False, out)

    def scaled_grouped_mm(
        self,
        a,
        b,
        scale_a,
        scale_b,
        offs=None,
        bias=None,
        scale_result=None,
        out_dtype=None,
        use_fast_accum=False,
    ):
        """The product of tokens [T, K] with experts' matrices [experts, K, N]; of wgrad there is none here."""
        if "grouped" in self.refuse:
            raise RuntimeError(self.refuse["grouped"])
        (rows, k), (experts, depth, n) = a.shape, b.shape
        assert k == depth and k % 16 == 0 and n % 16 == 0, (a.shape, b.shape)
        assert a.stride() == (k, 1) and b.stride() == (n * k, 1, k), (a.stride(), b.stride())
        assert a.dtype == b.dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16, (
            "E4M3 alone, BF16 alone"
        )
        assert bias is None and scale_result is None
        assert offs.dtype == torch.int32 and offs.shape == (experts,) and offs[-1] == rows
        ends = [0, *offs.tolist()]
        parts = [a[first:last].double() for first, last in pairwise(ends)]
        if scale_a.dtype == torch.float8_e8m0fnu:
            assert scale_b.dtype == scale_a.dtype and not use_fast_accum
            assert scale_a.is_contiguous() and scale_a.shape == (
                sum(128 * ceil(len(part), 128) for part in parts), 4 * ceil(k, 128)
            )  # fmt: skip
            assert scale_b.shape == (experts, 4 * ceil(k, 128) * 128 * ceil(n, 128))
            tall = [128 * ceil(len(part), 128) for part in parts]
            first = [
                unswizzle(tiles.flatten(), len(p), k)
                for tiles, p in zip(scale_a.split(tall), parts, strict=True)
            ]
            second = [unswizzle(tiles, n, k) for tiles in scale_b]
        else:
            assert scale_a.dtype == scale_b.dtype == torch.float32
            assert scale_a.shape == (rows,) and scale_b.shape == (experts, n) and scale_b.is_contiguous()
            first = [scale_a[f:t, None].double() for f, t in pairwise(ends)]
            second = [scale[:, None].double() for scale in scale_b]
        self.calls["grouped"] += 1
        done = [
            (part * mine) @ (matrix.t().double() * theirs).t()
            for part, matrix, mine, theirs in zip(parts, b, first, second, strict=True)
        ]
        if self.wrong == "grouped":
            done[-1] *= 2
        return torch.cat(done).to(out_dtype)

    def _vector_blocks(self, scale: torch.Tensor, rows: int, k: int) -> torch.Tensor:
        assert scale.shape == (rows, ceil(k, 128)) and scale.stride() == (1, rows), scale.stride()
        return scale.double().repeat_interleave(128, 1)[:, :k]

    def _product(self, kind, a, b, first, second, bias, out_dtype, fast, out=None):
        k, n = a.shape[1], b.shape[1]
        assert a.dtype in F8 and b.dtype in F8 and torch.float8_e4m3fn in (a.dtype, b.dtype)
        turned = a.stride() != (k, 1), b.stride() != (1, k)
        if any(turned) and kind.startswith("tensor"):
            if not self.turned:
                raise RuntimeError("mat1 must be row-major and mat2 column-major")
            assert (
                a.stride() == ((1, len(a)) if turned[0] else (k, 1))
                and len(a) % (16 if turned[0] else 1) == 0
            )
            assert b.stride() == ((n, 1) if turned[1] else (1, k))
            kind = "tensor turned"
        else:
            assert not turned[0], f"a must be row-major, has strides {a.stride()}"
            assert not turned[1], f"b must be column-major, has strides {b.stride()}"
        assert b.shape[0] == k and k % 16 == 0 and n % 16 == 0, (k, n)
        product = (a.double() * first) @ (b.t().double() * second).t()
        return self._finish(kind, product, bias, out_dtype, fast, out)

    def _finish(self, kind, result, bias, out_dtype, fast, out):
        for refused in (kind, kind.removesuffix(" v1")):
            if refused in self.refuse:
                raise RuntimeError(self.refuse[refused])
        assert out_dtype in (torch.bfloat16, torch.float16, torch.float32)
        without = f"{kind.removesuffix(' v1')} float32"
        if without in self.refuse and out_dtype == torch.float32:
            raise RuntimeError(self.refuse[without])
        if bias is not None:
            assert bias.shape == result.shape[1:] and bias.dtype == out_dtype != torch.float32, (
                bias.dtype,
                out_dtype,
            )
            result += bias.double()
        if self.wrong == kind:
            result[:, 128:] *= 2
        self.calls[kind] += 1
        self.history.append(
            {"kind": kind, "out": out_dtype, "bias": bias is not None, "fast": fast, "into": out is not None}
        )
        if out is None:
            return result.to(out_dtype)
        assert out.shape == result.shape and out.dtype == out_dtype and out.is_contiguous()
        assert out.data_ptr() % 16 == 0, "cuBLASLt wants results aligned"
        return out.copy_(result)

    @property
    def last(self) -> dict[str, Any]:
        """The last product: its kind, dtype, whether it added a bias, whether it accumulated fast."""
        return self.history[-1]


def _readable(a, b, scale_a, scale_b, bias):
    """cuBLASLt reads codes, vectors of scales (pytorch#159957) and a bias in pieces of 16 bytes; torch hands it a bias's
    address alone."""
    vectors = {"scale of a": scale_a, "scale of b": scale_b, "bias": bias}
    read = {"a": a, "b": b} | {name: x for name, x in vectors.items() if x is not None and x.numel() > 1}
    for name, x in read.items():
        assert x.data_ptr() % 16 == 0, f"{name} begins {x.data_ptr() % 16} bytes after a multiple of 16"
    assert bias is None or bias.is_contiguous(), f"bias has strides {bias.stride()}"


def _square_blocks(scale: torch.Tensor, n: int, k: int) -> torch.Tensor:
    used = scale.t()[:, : ceil(k, 128)].double()
    return used.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def unswizzle(scale: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    """float64 [rows, k]: every element's scale, read by the index formula."""
    exponent = unswizzled(scale, rows, ceil(k, 32)).double() - 127
    return exponent.exp2().repeat_interleave(32, 1)[:, :k]


def unswizzled(scale: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """uint8 [rows, blocks]: bytes of scales in tiles."""
    wide = ceil(blocks, 4)
    assert scale.is_contiguous() and scale.numel() == 128 * ceil(rows, 128) * 4 * wide
    i, j = torch.arange(rows)[:, None], torch.arange(blocks)
    index = ((i // 128) * wide + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4
    return scale.flatten().view(torch.uint8)[index]


def of_four_bits(codes: torch.Tensor) -> torch.Tensor:
    """float64 [rows, 2 k] of float4_e2m1fn_x2 [rows, k]: a sign, two exponent bits, a mantissa bit; the first is low."""
    byte = codes.contiguous().view(torch.uint8)
    code = torch.stack((byte & 15, byte >> 4), -1).flatten(1).double()
    exponent, mantissa = (code % 8 / 2).floor(), code % 2
    size = torch.where(exponent == 0, mantissa / 2, (exponent - 1).exp2() * (1 + mantissa / 2))
    return torch.where(code >= 8, -size, size)


@contextmanager
def fake_torch(**options: Any) -> Iterator[FakeTorch]:
    """torch._scaled_mm, _scaled_mm_v2 and _scaled_grouped_mm replaced; what a machine can do is asked anew."""
    from megatron_fp8.backends.native import layout as native_layout
    from megatron_fp8.backends.native import probe as native_modes

    fake = FakeTorch(**options)

    def forget() -> None:
        native_modes.refusals.cache_clear()
        native_layout.plan.cache_clear()

    forget()
    with (
        mock.patch.object(torch, "_scaled_mm", fake.scaled_mm),
        mock.patch.object(torch, "_scaled_mm_v2", fake.scaled_mm_v2),
        mock.patch.object(torch, "_scaled_grouped_mm", fake.scaled_grouped_mm),
    ):
        yield fake
    forget()
