"""NVFP4 on the native backend: the product through a torch that checks every layout rule, and what is asked of a GPU."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_fp8.backends import choose_backend, emulated
from megatron_fp8.backends.native import backend as native
from megatron_fp8.backends.native import fp4
from megatron_fp8.kernels import fp4_quantize
from megatron_fp8.recipe import NVFP4BlockScaling
from tests.support.products import operands
from tests.support.scaled_mm import fake_torch
from tests.support.sites import RECIPES

CPU = torch.device("cpu")
RECIPE = NVFP4BlockScaling()


@pytest.fixture(autouse=True)
def forgotten():
    """What was found of a device or a stream is asked anew."""
    fp4._wrong_codes.cache_clear()
    fp4._last.clear()
    yield
    fp4._wrong_codes.cache_clear()
    fp4._last.clear()


@pytest.fixture
def tensor_cores():
    """A machine that this CPU stands in for."""
    with mock.patch.object(native, "device_reason", return_value=None):
        yield


def test_a_gpu_with_the_product_runs_it(tensor_cores):
    """Once tried, nothing is asked again."""
    with fake_torch() as fake:
        backend, why = choose_backend("auto", CPU, RECIPE)
        assert backend is native and why == "the fastest here" and set(fake.calls) == {"fp4"}
        tried = fake.calls.total()
        assert native.supports(CPU, RECIPE) is None and fake.calls.total() == tried


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"refuse": {"fp4": "only sm100"}}, "fprop: 1x16 scales, float4_e2m1fn_x2 by .*only sm100"),
        ({"wrong": "fp4"}, "it is computed wrongly"),
    ],
    ids=["refused", "wrong"],
)
def test_a_gpu_without_the_product_emulates_and_says_why(tensor_cores, options, said):
    with fake_torch(**options):
        backend, why = choose_backend("auto", CPU, RECIPE)
        assert backend is emulated and why.startswith("not native: fprop: ")
        with pytest.raises(ValueError, match=f"'native' cannot run on cpu: .*{said}"):
            choose_backend("native", CPU, RECIPE)


def test_codes_are_asked_and_not_assumed(tensor_cores):
    """Transformer Engine trained on gradients of zero on sm_120, in silence."""
    cast = fp4_quantize.cast

    def zeros(x, direction, amaxes, **options):
        sides = cast(x, direction, amaxes, **options)
        if options["draws"] is not None:
            for side in sides:
                side.codes.view(torch.uint8).zero_()
        return sides

    with fake_torch(), mock.patch.object(fp4_quantize, "cast", zeros):
        backend, why = choose_backend("auto", CPU, RECIPE)
    assert backend is emulated
    assert why == "not native: its stochastic cast to NVFP4 gives other codes than specified"
    fp4._wrong_codes.cache_clear()
    failing = mock.patch.object(
        fp4_quantize, "cast", side_effect=RuntimeError("no such instruction\nat line 3")
    )
    with fake_torch(), failing:
        assert native.supports(CPU, RECIPE) == "its cast to NVFP4 fails: no such instruction"
        assert native.supports(CPU, RECIPES["mxfp8"]) is None


def test_operands_of_two_kinds_have_no_product(tensor_cores):
    mixed = RECIPES["mxfp8"]
    a, _ = operands("fprop", RECIPE, 32, 48, 64)
    _, other = operands("fprop", mixed, 32, 48, 64)
    with fake_torch(), pytest.raises(ValueError, match="multiplies 1x16 blocks with E4M3 scales by 1x32"):
        native.gemm(a, other)


class Stream(SimpleNamespace):
    """Notes which streams it waits for."""

    def wait_stream(self, other):
        self.waits.append(other.name)

    def __eq__(self, other):
        return self is other


def test_products_of_two_streams_come_one_after_another():
    """torch keeps a factor in one place until the GPU has read it."""
    first, second = Stream(name="first", waits=[]), Stream(name="second", waits=[])
    now = {"stream": first, "capturing": False, "peer": True}
    gpu = [torch.device("cuda", i) for i in range(2)]
    with (
        mock.patch.object(torch.cuda, "current_stream", lambda device: now["stream"]),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: now["capturing"]),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda a, b: now["peer"]),
    ):
        for stream in (first, first, second, second, first):
            now["stream"] = stream
            fp4._wait_for_the_last(gpu[0])
        assert (first.waits, second.waits) == (["second"], ["first"])
        now |= {
            "stream": second,
            "capturing": True,
        }  # a graph's capture must not wait for what is outside of it
        fp4._wait_for_the_last(gpu[0])
        assert (first.waits, second.waits) == (["second"], ["first"])
        fp4._wait_for_the_last(gpu[1])
        now["peer"] = False
        with pytest.raises(RuntimeError, match="keeps the factor of NVFP4 products on cuda:0, which cuda:1"):
            fp4._wait_for_the_last(gpu[1])
