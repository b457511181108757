"""A launch is Triton's the first time, and afterwards what it compiled: for arguments that it would compile alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from megatron_fp8.kernels.launch_cache import launch  # noqa: E402
from tests.support.triton_stub import SimulatedSite, in_place_of_triton  # noqa: E402


def _add(x, y, rows, factor, out, ROWS: tl.constexpr):
    """A kernel that is never compiled."""


@pytest.fixture
def there() -> Iterator[SimulatedSite]:
    with in_place_of_triton() as stand_in:
        yield stand_in


def arguments(**changed: Any) -> dict[str, Any]:
    x, out = torch.ones(64, dtype=torch.float32), torch.ones(64, dtype=torch.float32)
    given = {"x": x, "y": None, "out": out, "rows": 64, "factor": 0.5, "ROWS": 16, "num_warps": 4}
    return given | changed


def test_the_second_launch_is_what_the_first_compiled(there: SimulatedSite) -> None:
    """With pointers, in the order of the signature, without the options; other sizes of its kind are its too."""
    kernel = triton.JITFunction(_add)
    launch(kernel, (3,), **arguments())
    again = arguments(rows=128, factor=2.0)
    launch(kernel, (5,), **again)
    (compiled,) = there.made
    pointers = again["x"].data_ptr(), again["out"].data_ptr()
    assert compiled.starts == [((5, 1, 1), 7, pointers[0], None, 128, 2.0, pointers[1], 16)]


OTHERS: dict[str, dict[str, Any]] = {
    "a dtype": {"x": torch.ones(64, dtype=torch.bfloat16)},
    "a place off 16 bytes": {"x": torch.ones(65, dtype=torch.float32)[1:]},
    "a tensor that is there": {"y": torch.ones(64, dtype=torch.float32)},
    "1": {"rows": 1},
    "no multiple of 16": {"rows": 65},
    "beyond 32 bits": {"rows": 1 << 31},
    "another type": {"rows": 64.0},
    "a constant": {"ROWS": 32},
    "an option": {"num_warps": 8},
    "an option more": {"maxnreg": 128},
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_kind_is_compiled_anew(other: str, there: SimulatedSite) -> None:
    kernel = triton.JITFunction(_add)
    for _ in range(2):
        launch(kernel, (1,), **arguments())
        launch(kernel, (1,), **arguments(**OTHERS[other]))
    assert len(there.made) == 2 and [len(compiled.starts) for compiled in there.made] == [1, 1]


def test_kernels_do_not_share_what_was_compiled(there: SimulatedSite) -> None:
    for _ in range(2):
        launch(triton.JITFunction(_add), (1,), **arguments())
    assert [len(compiled.starts) for compiled in there.made] == [0, 0]


def test_what_is_known_alike_triton_compiles_alike(there: SimulatedSite) -> None:
    """Its own specialisation, asked of each number and each place."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import jit

    if not hasattr(jit, "native_specialize_impl"):
        pytest.skip("this Triton specialises in another place")
    backend = make_backend(GPUTarget("cuda", 90, 32))
    sizes = [
        0,
        1,
        2,
        8,
        15,
        16,
        17,
        32,
        48,
        1000,
        1024,
        (1 << 31) - 16,
        (1 << 31) - 1,
        1 << 31,
        (1 << 31) + 1,
    ]
    memory = torch.ones(256, dtype=torch.uint8)
    places = [memory[offset:] for offset in (0, 1, 2, 4, 8, 16, 24, 32, 128)]
    for name, values in (("rows", sizes), ("x", places)):
        kernel, kinds = triton.JITFunction(_add), []
        for value in values:
            launch(kernel, (1,), **arguments(**{name: value}))
            kinds.append((there.last, value))
        for (one, a), (other, b) in itertools.combinations(kinds, 2):
            if one == other:
                told = [jit.native_specialize_impl(backend, v, False, True, True) for v in (a, b)]
                assert told[0] == told[1], f"{name} {a} and {b} are compiled differently"


def test_codes_are_bytes_to_kernels(there: SimulatedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    run = there.run
    monkeypatch.setattr(
        there, "run", lambda kernel, **arguments: (given.append(arguments["x"]), run(kernel, **arguments))[1]
    )
    codes = torch.ones(64, dtype=torch.float32).to(torch.float8_e4m3fn)
    for x in (codes, codes.to(torch.float8_e5m2)):
        launch(triton.JITFunction(_add), (1,), **arguments(x=x))
    assert [x.dtype for x in given] == [torch.uint8] * 2 and given[0].data_ptr() == codes.data_ptr()


def test_hooks_before_a_launch_are_called_each_time(there: SimulatedSite) -> None:
    kernel = triton.JITFunction(_add)
    kernel.add_pre_run_hook(lambda *_, **__: None)
    for _ in range(3):
        launch(kernel, (1,), **arguments())
    assert len(there.made) == 3


def test_on_the_device_of_its_tensors(there: SimulatedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 1)
    kernel = triton.JITFunction(_add)
    for _ in range(2):
        launch(kernel, (1,), **arguments())
    assert entered == [1]
    there.active.get_current_device = lambda: 1
    launch(kernel, (1,), **arguments())
    assert entered == [1]
