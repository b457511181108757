"""Any words after any command: the work is done or refused in one line, and what a command reads stays as it is."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8.commands.main import COMMANDS
from megatron_fp8.serve.parity import KINDS
from megatron_fp8.study import compare_runs as launch
from tests.support.draws import draws
from tests.support.fuzz_targets import FIXTURES, fresh
from tests.support.invalid_values import WRITTEN
from tests.support.run_in_process import done_or_refused

READ = (
    "run", "run/checkpoints", "run/checkpoints/iter_0000001", "hf", "calibration", "config.yaml", "corpus.txt",
)  # fmt: skip
ODD = (
    "table.json", "bench.json", "empty", "gone", "gone/deep", "device", "pipe", "loop", ".", "/", "", "\udcff",
    "a\0b", "long" * 100, "deep/" * 1000,
)  # fmt: skip
A, N = (*READ, *ODD), ("0", "1", "2", "-1", "1e9", "0.5", "nan", "inf", "-inf", "x", "", "9" * 21, "1_0", "٣")
W = (
    "bf16", "tensorwise", "mxfp8,delayed", "custom", "hybrid", "e4m3", "all", "x", "", ",", "emulated", "native",
    "quantise",
)  # fmt: skip
F = ("new", "new/deep", "empty", "corpus.txt/x", "device", "", "\udcff", "long" * 100)
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "report": {"--html": F, "--advice": F},
    "inspect": {"--json": (), "--check": ()},
    "generate": {
        "--prompt": ("the", "", "x" * 9, "\0", "\udcff"), "--max-new-tokens": N, "--temperature": N, "--top-k": N,
        "--top-p": N, "--seed": N, "--activations": ("static", "dynamic", "x"), "--calibration": A, "--recipe": W,
        "--fp8": W, "--config": A, "--model.fp8_margin": N,
    },
    "calibrate": {
        "--data": A, "--batches": N[:3], "--batch-size": N[:3], "--percentile": N, "--out": F, "--recipe": W,
        "--config": A,
    },
    "export": {
        "--format": ("bf16", "fp8-tensor", "fp8-channel", "fp8-block", "mxfp8", "nvfp4", "x"), "--calibration": A,
        "--ignore": W, "--like": A, "--quantize-all": (), "--config": A, "--vocab-size": N,
        "--max-position-embeddings": N, "--max-shard-size": ("5GB", "1KB", "0", "x", "1", "-1GB", "9" * 30),
    },
    "import": {"--tokenizer": A},
    "parity": {
        "--engine": ("vllm", "sglang", "transformers", "x"), "--accept": (*W, "inputs", "x:*"), "--json": F,
        "--kv-cache-dtype": ("fp8", "auto", "x"), "--numbers": (), "--data": A, "--tokens": N, "--max-kl": N,
    },
    "tokenizer": {"--vocab-size": ("257", "1", "x", ""), "--out": F},
    "formats": {"--table": ("values", "formats", "x", ""), "--csv": F},
    "bench": {
        "--only": (*W, "quantise,gemm"), "--recipe": W, "--fp8": W, "--backend": W, "--threads": ("0", "-1",
        "x", "9" * 9),
        "--shape": ("16x16x1", "0x1x1", "x", "1x1", "9999999x9999999x9999999", "-1x1x1", "1x1x1"), "--json": (),
        "--tune": (), "--out": F, "--compare": A, "--config": A,
    },
    "estimate": {
        "--config": (*A, "tiny_gpt_cpu", "llama3_8b"), "--gpus": N, "--device": ("H100", "x", ""), "--reserve": N,
        "--set": ("model.hidden_size=64", "x", "=", "model.num_layers=" + "9" * 30, "train.seq_length=0",
        "model.fp8=x"),
        "--model.hidden_size": N, "--json": (),
    },
    "doctor": {"--config": (*A, "tiny_gpt_cpu"), "--json": (), "--model.fp8": W},
    "diagnose": {
        "--against": A, "--json": F, "--iteration": N, "--batches": N, "--share": N, "--budget": N, "--recipe": W,
    },
    "compare": {
        "--config": A, "--recipes": W, "--seeds": (*N, "1,1"), "--out": F, "--ranks": N, "--train.train_iters": N,
    },
    "train": {
        "--config": A, "--run_dir": F, "--resume": (*A, "auto", "never"), "--data": A, "--data.tokenizer": A,
        "--dry-run": (),
    },
}  # fmt: skip
"""Of each command: values that are paths (A), numbers (N), words (W) and files to write (F), and others."""
REQUIRED = {
    "report": ("run",), "inspect": ("run",), "generate": ("run", "--prompt=the"), "calibrate": ("run", "--batches=1"),
    "export": ("run", "new"), "import": ("hf", "new"), "parity": ("run", "hf", *(f"--accept={kind}" for kind in KINDS)),
    "tokenizer": ("--out=new", "--data=corpus.txt"), "diagnose": ("run", "--against=run"),
    "bench": ("--only=quantise", "--recipe=rowwise", "--shape=16x16x1", "--repetitions=1"),
    "compare": ("--config=config.yaml",), "train": ("--config=config.yaml", "--run_dir=new", "--train.train_iters=1"),
}  # fmt: skip


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command as it should be, with options that have some value, words left out,
    said twice and in another order."""
    command = draw(st.sampled_from(sorted(OPTIONS)))
    words = list(REQUIRED.get(command, ()))
    for name in draw(st.lists(st.sampled_from(sorted(OPTIONS[command])), max_size=4)):
        found = OPTIONS[command][name]
        value = draw(st.sampled_from(found) if found else st.just(""))
        words += draw(st.sampled_from(([f"{name}={value}"], [name, value]))) if found else [name]
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 2)))):
        at = draw(st.integers(0, len(words)))
        other = draw(st.sampled_from((*A, *WRITTEN, "-", "--", "-h", "--help", "--x", "--x=1")))
        words[at : at + draw(st.integers(0, 1))] = [other]
    return [command, *words]


def content(folder: Path) -> dict[str, str]:
    """Digests of the ordinary files."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def prepare(place: Path, originals: Path) -> None:
    """All that is there to be named."""
    fresh(place, originals)
    (place / "empty").mkdir()
    (place / "device").symlink_to("/dev/zero")
    (place / "loop").symlink_to("loop")
    os.mkfifo(place / "pipe")


@draws(10, often=2, suppress_health_check=[FIXTURES])
@given(command_lines())
def test_any_words(originals, place, words):
    prepare(place, originals)
    before = content(place / "run" / "checkpoints") | content(place / "hf") | content(place / "cache")
    with mock.patch.object(launch, "train_all", side_effect=ValueError("it would train now")):
        done_or_refused(*words)
    assert all(content(Path(path).parent)[path] == digest for path, digest in before.items())


def test_every_command_is_tried():
    """But launch, which is in test_launches.py."""
    assert set(OPTIONS) == set(COMMANDS) - {"launch"}


@pytest.mark.parametrize("command", [name for name in REQUIRED if name != "compare"])
def test_the_words_it_needs_are_enough(originals, place, command):
    """Else these tests would show nothing."""
    prepare(place, originals)
    assert done_or_refused(command, *REQUIRED[command]).code == 0
