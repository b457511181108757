"""Streams of live models: the bytes of an export, in every layout, in bounded memory, also in another process."""

from __future__ import annotations

import hashlib
import multiprocessing
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.support.ranks import Layout, model_parallel
from megatron_fp8.commands.export import main as export_main
from megatron_fp8.commands.import_ import main as import_main
from megatron_fp8.files.checkpoint import Manifest, find_checkpoint, read_manifest
from megatron_fp8.serve import transport, weight_stream
from megatron_fp8.serve.stream import HfWeights
from tests.support.hf import VOCAB, build, hf_model, stored_tensors

FP8 = "--model.fp8=hybrid"
CASES: dict[str, tuple[str, str, Layout, tuple[str, ...], tuple[str, ...]]] = {
    "llama, tensor parallel, FP8 parameters": (
        "llama", "fp8-tensor", Layout(tp=2, sp=True),
        (FP8, "--model.fp8_format=tensorwise", "--model.fp8_param=true"), (),
    ),
    "mistral, a weight's master on two ranks": (
        "mistral", "fp8-block", Layout(),
        (FP8, "--model.fp8_format=blockwise", "--model.fp8_param=true", "--optimizer.use_distributed_optimizer=true"), (),
    ),
    "qwen3, pipeline, tied, one layer in BF16": (
        "qwen3", "fp8-channel", Layout(pp=2),
        (FP8, "--model.fp8_format=rowwise", '--model.fp8_overrides={"*.layers.1.mlp.*": "bf16"}'), (),
    ),
    "mixtral, expert parallel": ("mixtral", "mxfp8", Layout(ep=2), (), ("--ignore=*.o_proj",)),
    "deepseek_v3, expert parallel": ("deepseek_v3", "nvfp4", Layout(ep=2), ("--model.fp4=e2m1",), ()),
    "qwen2, in BF16": ("qwen2", "bf16", Layout(tp=2), (), ()),
}  # fmt: skip


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Any:
    """Family -> the folder of a run that was imported from a small model in BF16."""
    found: dict[str, Path] = {}

    def run_of(kind: str) -> Path:
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind)
            extra: dict[str, Any] = {"tie_word_embeddings": True} if kind == "qwen3" else {}
            extra |= (
                {"num_hidden_layers": 3} if kind == "mistral" else {}
            )  # the middle of the masters is in a weight
            hf_model(kind, torch.bfloat16, **extra).save_pretrained(folder / "hf")
            assert import_main([str(folder / "hf"), str(folder / "run")]) == 0
            found[kind] = folder / "run"
        return found[kind]

    return run_of


def trained(source: str, layout: Layout, fields: tuple[str, ...]) -> tuple[Any, list[Any], Any]:
    """(run, chunks, optimizer) of an imported run after an optimizer step."""
    from megatron_fp8.mcore import checkpoint

    run, chunks, optimizer = build(f"{source}/config.yaml", layout, *fields)
    folder = find_checkpoint(Path(source))
    checkpoint.load(folder, read_manifest(folder), chunks, optimizer)
    torch.manual_seed(1)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape))
    assert optimizer.step()[0]
    return run, chunks, optimizer


def digest(tensor: torch.Tensor) -> tuple[str, list[int], str]:
    """Dtype, shape and a hash of the bytes."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), list(tensor.shape), hashlib.sha256(content).hexdigest()


def stream_case(
    source: str,
    out: str,
    form: str,
    layout: Layout,
    fields: tuple[str, ...],
    ignore: tuple[str, ...],
    size: int,
) -> list[tuple[str, Any]]:
    """A case for ranks: the model is saved and streamed. (name, digest) in the stream's order."""
    from megatron_fp8.mcore import checkpoint
    from megatron_fp8.mcore.checkpoint.saver import Saver

    with model_parallel(layout):
        run, chunks, optimizer = trained(source, layout, fields)
        found = [
            (name, digest(tensor))
            for name, tensor in weight_stream(chunks, form, size, ignore=ignore, vocab_size=VOCAB)
        ]
        facts = {**checkpoint.layout_facts(chunks), "run": run.to_dict()}
        saver = Saver(Path(out))
        saver.save(
            checkpoint.sharded_state(chunks, optimizer),
            Manifest(1, checkpoint.numbers(chunks, optimizer), facts),
        )
        saver.close()
        return found


@pytest.mark.parametrize("name", CASES)
def test_a_stream_is_the_export_byte_for_byte_on_every_rank(imported, ranks, tmp_path, name):
    kind, form, layout, fields, options = CASES[name]
    ignore = tuple(option.partition("=")[2] for option in options)
    source = str(imported(kind))
    first, second = ranks(2).run(
        stream_case, source, str(tmp_path / "saved"), form, layout, fields, ignore, 300_000
    )
    assert first == second and len(dict(first)) == len(first)
    assert export_main([str(tmp_path / "saved"), str(tmp_path / "out"), f"--format={form}", *options]) == 0
    exported = {key: digest(tensor) for key, tensor in stored_tensors(tmp_path / "out").items()}
    assert exported.keys() == dict(first).keys()
    for key, value in first:
        assert value == exported[key], key
    assert form == "bf16" or any("scale" in key for key in exported)
    before = stored_tensors(imported(kind).parent / "hf")  # the step has changed what is compared
    assert digest(before["model.norm.weight"]) != exported["model.norm.weight"]


# --------------------------------------------------------------------------------------------------------------- memory


class BytesAlive(TorchDispatchMode):
    """Counts the bytes of storages that operators make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {
            t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs | self._known:
                    self._add(storage)
        return out

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def memory_case(source: str, form: str, layout: Layout, size: int) -> tuple[int, int, int]:
    """A case for ranks: peak and final bytes alive while streaming, and bytes of the largest fused weight."""
    with model_parallel(layout):
        _, chunks, _ = trained(
            source, layout, (FP8, "--model.fp8_format=tensorwise", "--model.fp8_param=true")
        )
        with BytesAlive() as counter:
            for _, tensor in weight_stream(chunks, form, size, vocab_size=VOCAB):
                del tensor
        until = time.monotonic() + 20
        while counter.alive > 10_000 and time.monotonic() < until:  # gloo's threads free what they sent
            time.sleep(0.1)
        return counter.peak, counter.alive, max(p.numel() * 2 for p in chunks[0].parameters()) * layout.tp


def test_memory_follows_the_bucket_and_not_the_model(imported, ranks):
    """A bucket below the largest GEMM: the GEMM's whole weight, a rank's part of it, codes, and a copy while casting
    (3.7 times the weight), and what gloo's threads have sent and not freed."""
    source = str(imported("mistral"))
    small, large = (
        ranks(2).run(memory_case, source, "fp8-tensor", Layout(tp=2), size)[0]
        for size in (100_000, 50_000_000)
    )
    whole = sum(t.nbytes for t in stored_tensors(imported("mistral").parent / "hf").values())
    peak, rest, gemm = small
    assert rest < 10_000, rest
    assert gemm < peak < 6 * gemm < whole, (peak, gemm, whole)
    assert large[0] > max(whole, 2 * peak), (peak, large, whole)


# ----------------------------------------------------------------------------------------------------------- transports


def broadcast_case(source: str, size: int) -> list[tuple[str, Any]]:
    """A case for ranks: rank 0 trains alone and sends to rank 1, which has no model."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    tensors = {
        "a": torch.arange(7, dtype=torch.uint8),
        "b.scale": torch.tensor(0.5),
        "c": torch.randn(3, 5).bfloat16(),
    }
    tensors |= {"d": torch.randn(4, 6).to(torch.float8_e4m3fn), "e": torch.empty(0, 4)}
    if dist.get_rank() == 0:
        torch.manual_seed(3)
        found = list(tensors.items())
        transport.broadcast(iter(found), size)
    else:
        found = [(name, tensor.clone()) for name, tensor in transport.receive_broadcast()]
    del groups
    return [(name, digest(tensor)) for name, tensor in found]


@pytest.mark.parametrize("size", [1, 64, 10**6])
def test_a_broadcast_arrives_with_every_byte(ranks, size):
    sent, received = ranks(2).run(broadcast_case, "", size)
    assert sent == received and [name for name, _ in sent] == ["a", "b.scale", "c", "d", "e"]


def _receiver(connection: Any) -> None:
    """In another process: receives, and sends back digests."""
    connection.send([(name, digest(tensor)) for name, tensor in transport.receive_shared_memory(connection)])


def shared(tensors: dict[str, torch.Tensor], size: int) -> list[tuple[str, Any]]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_receiver, args=(theirs,))
    process.start()
    theirs.close()
    try:
        transport.send_shared_memory(tensors.items(), size, ours)
        return ours.recv()
    finally:
        process.join(60)


def test_shared_memory_arrives_with_every_byte_and_leaves_no_file():
    tensors = {f"layer.{n}": torch.randn(50, n + 1).bfloat16() for n in range(30)} | {
        "last": torch.randn(5000)
    }
    before = set(Path("/dev/shm").glob("megatron_fp8-*"))
    assert shared(tensors, 4000) == [(name, digest(tensor)) for name, tensor in tensors.items()]
    assert set(Path("/dev/shm").glob("megatron_fp8-*")) == before


def test_shared_memory_that_is_too_small_is_refused(monkeypatch):
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    before = set(Path("/dev/shm").glob("megatron_fp8-*"))
    monkeypatch.setattr("os.posix_fallocate", full)
    ours, _theirs = multiprocessing.Pipe()
    with pytest.raises(ValueError, match=r"has no 1,000 bytes .*give a smaller bucket_bytes"):
        transport.send_shared_memory([("a", torch.zeros(3))], 1000, ours)
    assert set(Path("/dev/shm").glob("megatron_fp8-*")) == before


def test_cuda_ipc_refuses_tensors_of_the_cpu():
    ours, _ = multiprocessing.Pipe()
    with pytest.raises(ValueError, match=r"a is on cpu, and CUDA IPC hands over memory of NVIDIA GPUs"):
        transport.send_cuda_ipc([("a", torch.zeros(3))], 1000, ours)


# ----------------------------------------------------------------------------------------------------- other interfaces


@pytest.mark.parametrize("form", ["fp8-tensor", "mxfp8"])
def test_a_converted_model_streams_what_an_export_of_its_directory_has(tmp_path, form):
    from megatron_fp8.nn import convert_to_fp8

    model = hf_model("llama", torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    assert import_main([str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    assert (
        export_main(
            [str(tmp_path / "run"), str(tmp_path / "out"), f"--format={form}", "--ignore=*.layers.1.*"]
        )
        == 0
    )
    convert_to_fp8(model, skip=["*.layers.1.*", "lm_head"])
    exported = {key: digest(tensor) for key, tensor in stored_tensors(tmp_path / "out").items()}
    assert {name: digest(tensor) for name, tensor in weight_stream(model, form)} == exported


def test_frameworks_get_the_same_tensors():
    model = hf_model("llama", torch.bfloat16)
    expected = [(name, digest(tensor)) for name, tensor in weight_stream(model, "fp8-block")]
    bridge = HfWeights("fp8-block", 100_000, model=model)
    assert [(n, digest(t)) for n, t in bridge.export_weights(model)] == expected
    assert [
        (n, digest(t)) for n, t in bridge.export_hf_weights(model, cpu=True, show_progress=False)
    ] == expected
    chunks = list(bridge.get_hf_weight_chunks({}))
    assert [(n, digest(t)) for chunk in chunks for n, t in chunk] == expected and len(chunks) > 5
    assert all(len(chunk) == 1 or sum(t.nbytes for _, t in chunk) <= 100_000 for chunk in chunks)


def test_what_cannot_be_streamed_is_refused():
    model = hf_model("llama", torch.bfloat16)
    for arguments, words in {
        ("fp8",): "format='fp8' is unknown: use one of bf16, fp8-tensor",
        ("fp8-block", 0): "bucket_bytes=0",
    }.items():
        with pytest.raises(ValueError, match=words):
            weight_stream(model, *arguments)
    with pytest.raises(ValueError, match="matches no linear"):
        weight_stream(model, "fp8-block", ignore=["*.nothing"])
    with pytest.raises(ValueError, match="Linear has no config of transformers"):
        weight_stream(torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"the model has no decoder.layers.0.mlp.experts"):
        weight_stream(hf_model("mixtral", torch.bfloat16))
