"""Checkpoints that an earlier version wrote, kept so that later ones resume from them to the same bits.

tests/fixtures/checkpoints has one archive a kind of checkpoint (KINDS), saved after two of four iterations, and
expected.json: the losses of iterations 3 and 4 and digests of what iteration 4 saved, as the run that wrote it went on.
They were made once, by

    python -m tests.support.old_checkpoints

at the last version whose manifests had no checksum, and are never made again: another kind gets another archive. Corpus
and tokenizer are made here, the same on every machine, and every path in the manifests is relative.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

FOLDER = Path(__file__).parents[1] / "fixtures" / "checkpoints"
SAVED, LAST = 2, 4
WORDS = ["spam", "eggs", "ham", "toast", "tea", "bacon", "beans", "sausage", "lobster", "crumpet"]

_MODEL = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32,
    "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False,
    "make_vocab_size_divisible_by": 8, "use_cpu_initialization": True, "hidden_dropout": 0.1,
    "attention_dropout": 0.0, "fp8": "hybrid",
}  # fmt: skip
_HISTORY = {"fp8_recipe": "delayed", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
# Kind -> (ranks, fields of the model section, fields of the optimizer section)
KINDS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "delayed": (1, _HISTORY, {}),
    "fp8_param": (1, {"fp8_recipe": "tensorwise", "fp8_param": True}, {}),
    "tensor_parallel": (2, {**_HISTORY, "tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "distributed_optimizer": (2, {"fp8_recipe": "blockwise", "fp8_param": True}, {
        "use_distributed_optimizer": True,
    }),
}  # fmt: skip


def write_data(folder: Path) -> None:
    """corpus.txt and tokenizer.json, a token a word."""
    words = random.Random(0).choices(WORDS, k=4000)
    (folder / "corpus.txt").write_text(" ".join(words))
    vocabulary = {word: number for number, word in enumerate([*WORDS, "<unk>", "<|endoftext|>"])}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def options(kind: str) -> list[str]:
    """The command line of the run, in a folder that ``write_data`` has filled; it writes to run."""
    ranks, model, optimizer = KINDS[kind]
    sections: dict[str, dict[str, Any]] = {
        "model": {**_MODEL, **model},
        "train": {
            "train_iters": LAST, "micro_batch_size": 2, "global_batch_size": 2 * ranks, "seq_length": 32,
            "eval_iters": 0, "threads": 1,
        },
        "optimizer": {"lr": 0.01, "lr_warmup_iters": 1, **optimizer},
        "data": {"paths": ["corpus.txt"], "tokenizer": "tokenizer.json", "split": "1,0,0", "cache_dir": "cache"},
        "checkpoint": {"save_interval": SAVED, "keep_last": 0},
    }  # fmt: skip
    given = [
        f"--{section}.{name}={json.dumps(value) if not isinstance(value, str) else value}"
        for section, values in sections.items()
        for name, value in values.items()
    ]
    return [*given, "--run_dir=run"]


def unpacked(kind: str, folder: Path) -> Path:
    """The kept checkpoint, with its data, in ``folder``, as a run has it; its own folder."""
    write_data(folder)
    with tarfile.open(FOLDER / f"{kind}.tar.xz") as archive:
        archive.extractall(folder / "run" / "checkpoints", filter="data")
    return folder / "run" / "checkpoints" / f"iter_{SAVED:07d}"


def expected(kind: str) -> dict[str, Any]:
    """What ``result`` said of the run that wrote the checkpoint, and of the machine that it ran on."""
    return json.loads((FOLDER / "expected.json").read_text())[kind]


def machine() -> dict[str, Any]:
    """What decides the bits of a float32 sum: with AMX, torch and MKL multiply bfloat16 in another order."""
    return {
        "torch": torch.__version__.partition("+")[0],
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "amx": torch.cpu._is_amx_tile_supported(),
    }


def train(folder: Path, arguments: list[str]) -> None:
    """A rank case: `megatron-fp8 train` with these options, in ``folder``, on the ranks of the case."""
    from benchmarks.support.ranks import reset_megatron
    from megatron_fp8.commands import train as app
    from megatron_fp8.train.launch import parallel
    from megatron_fp8.train.launch.environment import Launch
    from megatron_fp8.train.stop import StopRequest

    rank, size = dist.get_rank(), dist.get_world_size()
    # the case's ranks are together
    met: Any = SimpleNamespace(agree=lambda *_, **__: None, close=lambda: None, hosts_store=False)
    launch = Launch("test", rank, size, rank, size, barrier=met)
    threads = torch.get_num_threads()
    reset_megatron()
    with _in(folder):
        try:
            trainer = app.prepare(arguments, launch, StopRequest())
            app._train(trainer)
        finally:
            parallel._held.close()  # the run's locks; the groups are the case's
            reset_megatron()
            torch.use_deterministic_algorithms(False)
            torch.set_num_threads(threads)


@contextlib.contextmanager
def _in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def result(folder: Path) -> dict[str, Any]:
    """Losses of the iterations after the checkpoint, and digests of the state after the last one, by kind of tensor."""
    from megatron_fp8.files.checkpoint import read_manifest, read_metadata, read_tensor

    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    last = folder / "run" / "checkpoints" / f"iter_{LAST:07d}"
    metadata = read_metadata(last)
    hashers: dict[str, Any] = {}
    for name in sorted(metadata.state_dict_metadata):
        start = name.partition(".")[0]
        kind = "fp8" if ".fp8_state." in name else start if start in ("optimizer", "rng") else "weights"
        tensor = read_tensor(last, metadata, name).contiguous()
        hasher = hashers.setdefault(kind, hashlib.sha256())
        hasher.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return {
        "losses": [r["lm_loss"].hex() for r in records if r["iteration"] > SAVED],
        "state": read_manifest(last).state,
        "digests": {kind: hasher.hexdigest() for kind, hasher in hashers.items()},
        "machine": machine(),
    }


def _make() -> None:
    from benchmarks.support.ranks import RankPool

    FOLDER.mkdir(parents=True, exist_ok=True)
    found, pool = {}, RankPool()
    for kind, (ranks, *_) in KINDS.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_data(folder)
            pool(ranks).run(train, folder, options(kind))
            found[kind] = result(folder)
            with tarfile.open(FOLDER / f"{kind}.tar.xz", "w:xz", preset=9) as archive:
                saved = folder / "run" / "checkpoints" / f"iter_{SAVED:07d}"
                archive.add(saved, saved.name, filter=_anonymous)
    pool.close()
    (FOLDER / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    _make()
