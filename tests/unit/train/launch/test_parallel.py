"""How ranks meet: their GPUs, the layouts that fit, and what a layout must divide."""

import os
import re
import time
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from megatron_fp8 import kernels
from megatron_fp8.commands import train as app
from megatron_fp8.train.config.run_config import parse
from megatron_fp8.train.config.sections import TrainSection
from megatron_fp8.train.launch import environment, parallel
from megatron_fp8.train.launch.environment import Launch
from megatron_fp8.train.launch.parallel import check_layout, gpu_of
from tests.support.process_state import put_back


def on_node(rank, processes):
    return Launch("torchrun", rank, 64, rank, processes)


def test_each_process_has_a_gpu():
    assert [gpu_of(on_node(rank, 4), 4) for rank in range(4)] == [0, 1, 2, 3]
    assert gpu_of(on_node(3, 4), 1) == 0  # srun --gpus-per-task=1 shows each process its own
    with pytest.raises(
        ValueError, match="local rank 4 has no GPU: this node has 8 processes and shows 4 GPUs"
    ):
        gpu_of(on_node(4, 8), 4)


def test_what_another_attempt_may_not_meet_is_no_bad_input(monkeypatch, capsys):
    """The batch scripts do not start again after bad input, which stays bad."""
    told = []
    barrier = SimpleNamespace(tell=lambda code, line, say: (told.append(code), say()))
    for error, code in ((ValueError("a typo"), 2), (dist.DistBackendError("NCCL error: remote exit"), 1)):
        monkeypatch.setattr(app, "prepare", Mock(side_effect=error))
        assert app._run([], SimpleNamespace(barrier=barrier, world_size=2), None, False) == code
        assert told.pop() == code and capsys.readouterr().err == f"error: {error}\n"


def layout(world_size, *options, variables=()):
    run = parse([f"--{option}" for option in options])
    return check_layout(run.model, run.train, world_size, variables)


def test_the_data_parallel_size_is_what_is_left():
    with pytest.raises(ValueError, match=r"^the world size 3 \(WORLD_SIZE=3\) does not divide by tensor 2 "):
        layout(3, "model.tensor_model_parallel_size=2", variables=("RANK=0", "WORLD_SIZE=3"))
    tp2_pp2 = ("model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2")
    assert layout(1) == 1
    assert layout(8, *tp2_pp2) == 2
    assert layout(8, *tp2_pp2, "model.context_parallel_size=2") == 1


INTERLEAVED = [
    "model.pipeline_model_parallel_size=2",
    "model.virtual_pipeline_model_parallel_size=2",
    "model.num_layers=4",
]


@pytest.mark.parametrize(
    ("world_size", "options", "words"),
    [
        (4, ["model.pipeline_model_parallel_size=3"], "launch a multiple of 3"),
        (4, ["train.global_batch_size=6", "train.micro_batch_size=2"], "give a multiple of 8"),
        (2, ["model.context_parallel_size=2", "train.seq_length=6"], "train.seq_length=6"),
        (
            4,
            ["model.tensor_model_parallel_size=4", "model.sequence_parallel=true", "train.seq_length=30"],
            "give a multiple of 4",
        ),
        (
            4,
            (
                "model.tensor_model_parallel_size=2",
                "model.expert_model_parallel_size=2",
                "model.num_moe_experts=4",
                "model.moe_token_dispatcher_type=alltoall",
            ),
            "expert_tensor_parallel_size=1, or model.moe_token_dispatcher_type=allgather",
        ),
        (
            2,
            [
                "model.tensor_model_parallel_size=2",
                "model.expert_model_parallel_size=2",
                "model.num_moe_experts=4",
            ],
            "x expert tensor 2 = 4: launch a multiple of 4",
        ),
        (
            2,
            [*INTERLEAVED, "train.global_batch_size=6", "train.micro_batch_size=2"],
            "a multiple of 2 micro-batches",
        ),
    ],
)
def test_layouts_that_do_not_fit(world_size, options, words):
    with pytest.raises(ValueError, match=words):
        layout(world_size, *options)


# -------------------------------------------------------------------------------------------- on a GPU machine


@pytest.mark.parametrize(
    ("refused", "cores", "words"),
    [
        (None, 8, []),
        (
            "Triton cannot run a kernel here: no C compiler",
            8,
            ["no C compiler. Without kernels training is slow"],
        ),
        (None, 1, ["8 processes of this node may use 1 CPU core, .* --cpus-per-task"]),
    ],
)
def test_what_makes_a_gpu_machine_slow_is_said_at_the_start(monkeypatch, refused, cores, words):
    stances: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        kernels, "refusal", lambda device: refused if device == torch.device("cuda", 3) else "?"
    )
    monkeypatch.setattr(torch.compiler, "set_stance", stances.append)
    monkeypatch.setattr(parallel, "usable_cores", lambda: cores)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        parallel.check_gpu_machine(8)
    assert [bool(re.search(word, str(w.message))) for w, word in zip(said, words, strict=True)] == [
        True
    ] * len(words)
    assert stances == (["force_eager"] if refused else []), (
        "what Triton cannot compile runs as it was written"
    )


@pytest.mark.parametrize(
    ("options", "capability", "queues"),
    [
        ([], (9, 0), None),
        (["--config=llama3_8b"], (9, 0), "1"),  # its TP is 4
        (["--config=llama3_8b", "--model.tensor_model_parallel_size=1"], (9, 0), None),
        (["--config=qwen3_30b_a3b"], (9, 0), None),
        (["--model.tensor-model-parallel-size", "auto"], (9, 0), "1"),
        (["--model.context_parallel_size=2"], None, "1"),
        (["--model.context_parallel_size=2"], (10, 0), None),
        (["--config=nowhere.yaml"], (9, 0), "1"),  # refused later
    ],
)
def test_collectives_start_in_the_order_of_their_calls(options, capability, queues, monkeypatch):
    """CUDA reads the variable when it starts: it is set before Megatron-Core is imported. Only where it helps."""
    name, seen = "CUDA_DEVICE_MAX_CONNECTIONS", []

    def stop():
        seen.append(os.environ.get(name))
        raise ValueError("enough")

    monkeypatch.setattr(environment, "gpu_capability", lambda: capability)
    monkeypatch.setattr(environment, "find_launch", stop)
    with put_back():
        os.environ.pop(name, None)
        assert app.main(options) == 2
        os.environ[name] = "8"
        assert app.main(options) == 2
        assert seen == [queues, "8"]


def test_a_gpus_capability_without_starting_cuda(monkeypatch):
    calls = []

    class Library:
        def nvmlInit_v2(self):
            calls.append("init")
            return 0

        def nvmlDeviceGetHandleByIndex_v2(self, index, gpu):
            gpu._obj.value = 7 + index
            return 0

        def nvmlDeviceGetCudaComputeCapability(self, gpu, major, minor):
            assert gpu.value == 7
            major._obj.value, minor._obj.value = 9, 0
            return 3 if "broken" in calls else 0

    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: Library())
    assert environment.gpu_capability() == (9, 0) and calls == ["init"]
    calls.append("broken")
    assert environment.gpu_capability() is None
    monkeypatch.setattr(environment.ctypes, "CDLL", Mock(side_effect=OSError("no such file")))
    assert environment.gpu_capability() is None, "a machine without NVIDIA's driver"


def test_joining_makes_no_groups_for_ways_to_save_that_are_not_taken(monkeypatch):
    """Each of them would be a mesh of sockets among all data-parallel ranks. And slow products are replaced once."""
    asked, replaced = {}, []
    monkeypatch.setattr(parallel, "replace_slow", replaced.append)
    monkeypatch.setattr(parallel, "check_layout", lambda *_: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(
        "megatron.core.parallel_state.initialize_model_parallel", lambda **kw: asked.update(kw)
    )
    monkeypatch.setattr(parallel, "seed_streams", lambda _: None)
    run = parse([])
    with put_back():
        parallel.join(Launch("one process"), run.model, run.train)
    assert asked["create_gloo_process_groups"] is False
    assert replaced == [torch.bfloat16]


def works_long(beat_s, error):
    """A rank case: what rank 0's long work gave, and how often the ranks met for it."""
    met, broadcast = [], dist.broadcast_object_list

    def counted(*args, **kwargs):
        met.append(1)
        return broadcast(*args, **kwargs)

    def work():
        while beat_s and len(met) < 3:
            time.sleep(0.01)
        if error:
            raise ValueError("it does not fit")
        return "done"

    dist.broadcast_object_list = counted
    try:
        return parallel.on_first_rank(work, beat_s=beat_s), len(met)
    except ValueError as error:
        return str(error), len(met)
    finally:
        dist.broadcast_object_list = broadcast


def test_of_long_work_the_other_ranks_hear_meanwhile(ranks):
    """A collective gives up after its time, and the work may take longer: each wait is a short one."""
    first, second = ranks(2).run(works_long, 0.05, True)
    assert first == second and first[0] == "it does not fit" and first[1] >= 4
    assert ranks(2).run(works_long, None, False) == [("done", 1)] * 2


def finds(problems):
    """A rank case: what a rank's own work gave, or what all were told."""
    rank = dist.get_rank()

    def work():
        if rank in problems:
            raise ValueError(f"rank {rank} cannot")
        return rank

    try:
        return parallel.on_every_rank(work)
    except ValueError as error:
        return str(error)


def test_each_rank_has_its_own_result_or_all_the_same_error(ranks):
    assert ranks(2).run(finds, ()) == [0, 1]
    assert ranks(2).run(finds, (0, 1)) == ["rank 0 cannot"] * 2
    assert ranks(2).run(finds, (1,)) == ["rank 1 cannot"] * 2


@pytest.fixture
def gpus(monkeypatch):
    """A machine with GPUs whose settings are put back."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


def test_settings_of_a_deterministic_process(gpus, monkeypatch):
    parallel.set_deterministic()
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cuda.cudnn_sdp_enabled()
    # Flash attention obeys errors, not warnings.
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and os.environ["NCCL_ALGO"] == "^NVLS,NVLSTree"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    parallel.set_deterministic()
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":16:8", "Ring")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ValueError, match=r"CUBLAS_WORKSPACE_CONFIG=':0:0'.*unset it, or train with"):
        parallel.set_deterministic()


def test_determinism_is_set_before_the_first_use_of_a_gpu(gpus, monkeypatch):
    """join, up to the process group."""
    calls = []

    def stop(*_):
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append("set_device"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(parallel, "check_layout", lambda *_: None)
    monkeypatch.setattr(parallel, "set_deterministic", lambda: calls.append("deterministic"))
    monkeypatch.setattr(parallel, "check_gpu_machine", stop)
    for asked, expected in (
        (True, ["deterministic", "set_device"]),
        (None, ["set_device"]),
        (False, ["set_device"]),
    ):
        calls.clear()
        with pytest.raises(InterruptedError):
            parallel.join(Launch("one process"), None, SimpleNamespace(deterministic=asked))
        assert calls == expected


def test_a_cpu_run_is_deterministic_unless_asked_not_to_be():
    assert [parallel.is_deterministic(TrainSection(deterministic=asked)) for asked in (None, True, False)] == [
        True, True, False
    ]  # fmt: skip


def test_an_operation_that_is_not_deterministic_is_one_line(monkeypatch, capsys):
    launch = SimpleNamespace(rank=0, barrier=SimpleNamespace(tell=lambda code, line, say: say()))

    def fail(*_):
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation, but you set it")

    monkeypatch.setattr(app, "prepare", lambda *_: SimpleNamespace())
    monkeypatch.setattr(app, "_train", fail)
    assert app._run([], launch, None, False) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Traceback" not in said
    assert "cumsum_cuda_kernel does not have" in said and "--train.deterministic=false" in said


@pytest.mark.parametrize(
    ("ranks", "environ", "threads"),
    [
        (1, {}, 8),
        (2, {"OMP_NUM_THREADS": "1"}, 4),  # the launcher's
        (2, {"OMP_NUM_THREADS": "3"}, 3),
    ],
)
def test_a_rank_has_as_many_threads_as_the_environment_says(monkeypatch, ranks, environ, threads):
    monkeypatch.setattr(parallel, "usable_cores", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # as torch read it
    assert parallel._threads(on_node(0, ranks), environ) == threads
