"""The engine's patches one by one: devices, types, random streams, collectives, compilation."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.mcore.patches import cpu_engine
from tests.support.compiled_megatron import as_if_compiled


def test_names_cuda() -> None:
    assert all(
        map(cpu_engine.names_cuda, ["cuda", "cuda:1", 0, torch.device("cuda"), torch.device("cuda:0")])
    )
    assert not any(map(cpu_engine.names_cuda, [None, "cpu", torch.device("cpu"), "meta", True]))


def everything_that_takes_a_device() -> list[str]:
    """Every factory and method that takes device=, with 'cuda': which of them are not on the CPU."""
    from megatron_fp8.mcore.patches.cpu_engine import factories

    arguments: dict[str, tuple[Any, ...]] = {
        "as_tensor": ([1.0],), "asarray": ([1.0],), "tensor": ([1.0],), "scalar_tensor": (1.0,),
        "nested_tensor": ([torch.ones(2)],), "as_nested_tensor": ([torch.ones(2)],), "new_tensor": ([1.0],),
        "full": ((2,), 7.0), "new_full": ((2,), 7.0), "full_like": (torch.ones(2), 7.0),
        "linspace": (0, 1, 3), "logspace": (0, 1, 3), "range": (0, 3), "normal": (0.0, 1.0, (2,)),
        "randint": (5, (2,)), "randint_like": (torch.ones(2), 5), "randperm": (4,), "eye": (3,),
        "tril_indices": (2, 2), "triu_indices": (2, 2), "empty_permuted": ((2, 3), (1, 0)),
        "empty_strided": ((2,), (1,)), "new_empty_strided": ((2,), (1,)),
        "sparse_coo_tensor": ([[0]], [1.0], (2,)),
        "sparse_csr_tensor": ([0, 1], [0], [1.0], (1, 1)), "sparse_csc_tensor": ([0, 1], [0], [1.0], (1, 1)),
        "sparse_bsr_tensor": ([0, 1], [0], [[[1.0]]], (1, 1)), "sparse_bsc_tensor": ([0, 1], [0], [[[1.0]]], (1, 1)),
    }  # fmt: skip
    elsewhere = []
    with model_parallel():
        for owner, names in factories().items():
            for name in set(names) - {"from_file", "empty_quantized", "sparse_compressed_tensor"}:
                likes = (torch.ones(2),) if name.endswith("_like") else (4,)
                made = getattr(torch.ones(2) if owner == "torch.Tensor" else eval(owner), name)(
                    *arguments.get(name, likes), device="cuda"
                )
                elsewhere += [f"{owner}.{name}"] * (made.device.type != "cpu")
        x, linear = torch.ones(2), torch.nn.Linear(2, 2, device="cuda")
        for moved in (
            x.to("cuda"), x.to(0), x.to(torch.device("cuda", 1), torch.float64), x.to(device="cuda", copy=True),
            x.to("cuda:0", non_blocking=True), x.to(x), x.pin_memory(),
            linear.to("cuda").weight, linear.cuda().weight, linear.to("meta").to_empty(device="cuda").weight,
        ):  # fmt: skip
            elsewhere += [str(moved.device)] * (moved.device.type != "cpu")
        assert x.to(torch.float64).dtype == torch.float64 and x.to("meta").device.type == "meta"
        with torch.device("cuda"):
            elsewhere += ["a device context"] * (torch.empty(2).device.type != "cpu")
        with torch.device("meta"):
            assert torch.empty(2).device.type == "meta", "torch's own device context works"
        stream = torch.cuda.Stream(priority=-1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with stream:
            start.record(stream)
            stream.record_event(end)
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        torch.cuda.synchronize()
        assert end.query() and stream != torch.cuda.current_stream()
        # The optimizer's spelling of types is for the optimizer only.
        assert x.type() == "torch.FloatTensor" and x.type(torch.float64).dtype == torch.float64
        scope: dict[str, Any] = {"__name__": "megatron.core.optimizer.pretend", "x": x.bfloat16()}
        exec("kind = x.type(); double = x.type(x.dtype)", scope)
        assert scope["kind"] == "torch.cuda.BFloat16Tensor" and isinstance(scope["double"], torch.Tensor)
        assert (
            x.cuda() is x
            and torch.zeros(2, device=torch.cuda.current_device(), pin_memory=True).device == x.device
        )
        torch.cuda.nvtx.range_push("name")
        torch.cuda.nvtx.range_pop()
        assert 0 <= start.elapsed_time(end) < 60_000
    return elsewhere


def test_all_of_torch_that_takes_a_device_takes_cuda_for_the_cpu(ranks: RankPool) -> None:
    assert ranks(1).run(everything_that_takes_a_device)[0] == []


def random_streams() -> list[float]:
    """Numbers of the tracked stream between draws of the default one; nested forks continue each other."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.tensor_parallel.random import get_data_parallel_rng_tracker_name

    with model_parallel(Layout(tp=2)):
        tracker = get_cuda_rng_tracker()
        start = torch.get_rng_state()
        with tracker.fork():
            tracked = torch.rand(4)
        assert torch.equal(torch.get_rng_state(), start), "the default stream does not move inside a fork"
        torch.rand(5)
        with tracker.fork():
            more = torch.rand(4)
    with model_parallel(Layout(tp=2)):
        tracker = get_cuda_rng_tracker()
        with tracker.fork():
            first = torch.rand(2)
            with tracker.fork(get_data_parallel_rng_tracker_name()):
                inner = torch.rand(2)
            rest = torch.rand(6)
        assert torch.equal(torch.cat([first, rest]), torch.cat([tracked, more])), (
            "one stream, however it is cut"
        )
        assert not torch.equal(inner, first)
        try:
            with tracker.fork():
                raise KeyError("inside")
        except KeyError:
            assert tracker._current_state_name == "default-rng", "an exception leaves the fork"
    return tracked.tolist()


def test_random_streams(ranks: RankPool) -> None:
    first, second = ranks(2).run(random_streams)
    assert first != second, "tensor-parallel ranks drop different values"


def mixed_gather() -> None:
    """One coalesced call gathers bytes and BF16 values, as a bucket group with FP8 parameters does."""
    from torch.distributed import _coalescing_manager

    with model_parallel():
        from megatron.core.distributed import param_and_grad_buffer

        rank = dist.get_rank()
        codes = torch.arange(4, dtype=torch.uint8) + 100 * rank
        values = torch.tensor([1.5, -300.0, 2.0**-30, float("nan")]).bfloat16() * (rank + 1)
        all_codes, all_values = torch.empty(8, dtype=torch.uint8), torch.empty(8, dtype=torch.bfloat16)
        with _coalescing_manager(dist.group.WORLD, async_ops=True) as manager:
            for whole, part in ((all_codes, codes), (all_values, values)):
                param_and_grad_buffer.dist_all_gather_func(whole, part, group=dist.group.WORLD, async_op=True)
        manager.wait()
        assert all_codes.tolist() == [0, 1, 2, 3, 100, 101, 102, 103]
        assert torch.equal(all_values[4 * rank : 4 * rank + 4].view(torch.int16), values.view(torch.int16))
        assert all_values[[0, 1, 4, 5]].tolist() == [1.5, -300.0, 3.0, -600.0]


def test_coalesced_gather_of_bytes_and_bf16(ranks: RankPool) -> None:
    ranks(2).run(mixed_gather)


def compiled_functions() -> tuple[list[str], bool]:
    """Which of Megatron-Core's functions would compile when called; is torch.compile still itself?"""
    from megatron_fp8.mcore.patches.patching import loaded_megatron_modules

    with as_if_compiled("megatron.core.fusions.fused_bias_swiglu", "swiglu"), model_parallel():
        from megatron.core.jit import jit_fuser

        names = []
        for module in loaded_megatron_modules():
            owners = [module, *(c for c in vars(module).values() if isinstance(c, type))]
            for owner in owners:
                for name, value in vars(owner).items():
                    home = getattr(value, "__module__", None) or ""
                    if home.startswith("megatron.core.") and hasattr(value, "_torchdynamo_orig_callable"):
                        names.append(f"{module.__name__}.{name}")
        assert jit_fuser(compiled_functions) is compiled_functions
        return names, torch.compile.__module__ == "torch"


def test_nothing_of_megatron_is_compiled(ranks: RankPool) -> None:
    names, untouched = ranks(1).run(compiled_functions)[0]
    assert names == [] and untouched
