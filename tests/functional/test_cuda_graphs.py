"""train.cuda_graphs without a GPU: the recorded passes of an iteration run again, and the run is the eager one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest

from benchmarks.support.ranks import Layout, RankPool, model_parallel
from tests.support import cuda_graph_stub
from tests.support.host_syncs import ON_CPUS, waits
from tests.support.small_run import small_run

ITERATIONS, BAD = 8, 6
_MEASURED = {"tokens_per_s", "peak_memory"}
_CODES, _SHARDED = "--model.fp8_param=true", "--optimizer.use_distributed_optimizer=true"
_OWN_BUFFER = "--optimizer.reuse_grad_buf_for_mxfp8_param_ag=false"
_OPTIONS = [f"--train.train_iters={ITERATIONS}", "--train.eval_iters=1", "--train.eval_interval=3"]


def run_of(options: list[str]) -> dict[str, Any]:
    """A rank case: what a run says of its iterations, and where its capture would have waited for a GPU.

    The loss of iteration ``BAD`` is not finite. Validations come between replays.
    """
    with model_parallel(), ExitStack() as stack:
        from megatron_fp8.kernels import gemms
        from megatron_fp8.kernels.cpu import emulation
        from megatron_fp8.train import cuda_graph, step

        def patch(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        patch(emulation, "usable", lambda *_: False)  # the stand-in for a graph sees torch's operations only
        patch(emulation, "inner_loop", lambda: None)
        patch(gemms, "multiplies", lambda *_: False)
        patch(cuda_graph, "new_graph", cuda_graph_stub.new_graph)
        patch(step, "batches", with_bad_iteration(step.batches))
        found: dict[str, list[Any]] = {"metrics": [], "validations": [], "said": [], "waits": [], "eager": []}

        def captured(graph: Any, original: Any = cuda_graph.IterationGraph._capture) -> None:
            with waits(hidden=False) as seen:
                original(graph)
            found["waits"] += [place for place in seen.places if place not in ON_CPUS]

        patch(cuda_graph.IterationGraph, "_capture", captured)
        trainer = small_run(Layout(), [*_OPTIONS, *options])
        stepper = trainer.stepper
        stepper.datasets.append(stepper.datasets[0])
        trainer.display.say = found["said"].append

        def recorded(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                found[what].append(original(*args))
                return found[what][-1]

            return call

        trainer._timed_step = recorded("metrics", trainer._timed_step)
        stepper.validate = recorded("validations", stepper.validate)
        forward_backward = stepper._forward_backward

        def passes(*args: Any, forward_only: bool) -> Any:
            found["eager"] += [] if forward_only else [len(found["metrics"]) + 1]
            return forward_backward(*args, forward_only=forward_only)

        stepper._forward_backward = passes
        trainer.train()
        found["metrics"] = [
            {name: value for name, value in vars(metrics).items() if name not in _MEASURED}
            for metrics in found["metrics"]
        ]
        return found


def with_bad_iteration(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Training batches whose loss is not finite in iteration ``BAD``."""

    def batches(dataset: Any, train: Any, samples: int | None = None, *args: Any) -> Iterator[Any]:
        import torch.distributed as dist

        each = train.global_batch_size // (train.micro_batch_size)
        for number, batch in enumerate(original(dataset, train, samples or 0, *args)):
            bad = samples is not None and number * dist.get_world_size() // each == BAD - 1
            yield {**batch, "loss_mask": batch["loss_mask"] * float("inf")} if bad else batch

    return batches


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, ["--model.fp8_recipe=delayed", "--model.hidden_dropout=0.1"]),
        pytest.param(1, ["--model.fp8=null"], marks=pytest.mark.long),
        (2, ["--model.fp8_recipe=delayed"]),
        (1, ["--model.fp8_recipe=delayed", _CODES]),
        (2, ["--model.fp8_recipe=blockwise", _CODES, _SHARDED]),
        (2, ["--model.fp8_recipe=mxfp8", _CODES, _SHARDED]),
        *(
            pytest.param(2, [f"--model.fp8_recipe={recipe}", *options], marks=pytest.mark.long)
            for recipe in ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
            for options in ([_SHARDED], [_CODES], [_CODES, _SHARDED], [_CODES, _SHARDED, _OWN_BUFFER])
        ),
    ],
)
def test_a_run_by_replays_is_the_eager_run(ranks: RankPool, world: int, options: list[str]) -> None:
    eager = ranks(world).run(run_of, options)
    graphed = ranks(world).run(run_of, [*options, "--train.cuda_graphs=true"])
    every = range(1, ITERATIONS + 1)
    for one, other in zip(eager, graphed, strict=True):
        assert one["eager"] == [*every] and other["eager"] == [1, 2, 3, 4]
        assert one["metrics"] == other["metrics"] and one["validations"] == other["validations"]
        assert [metrics["skipped"] for metrics in other["metrics"]] == [int(i == BAD) for i in every]
        assert one["said"] == other["said"] and len(other["said"]) == 1
        assert not other["waits"]
