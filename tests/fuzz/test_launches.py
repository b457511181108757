"""`megatron-fp8 launch` and the environment of a rank: started as it is told, or one line; whatever else is set.

Ranks are not started here (tests/functional/test_launch.py): what would be is told in their place.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8.train.launch import launcher
from megatron_fp8.train.launch.environment import find_launch, is_host
from tests.support.draws import draws
from tests.support.fuzz_targets import FIXTURES, fresh
from tests.support.invalid_values import WRITTEN
from tests.support.run_in_process import Heard, done_or_refused

NUMBERS = (
    "0", "1", "2", "3", "-1", "1024", "1025", "1e9", "1000000000", "9" * 30, "9" * 5000, "nan", "inf", "0x2", "1.0",
    "x", "", " 2", "2 ", "1_0", "٣", "2\n", "\udcff",
)  # fmt: skip
PLACES = (
    "node0:29500", "127.0.0.1:1", ":29500", "node0", "node0:", "node0:0", "node0:65536", "node0:-1", "node0:x", "",
    ":", "[::1]:29500", "[::1:29500", "::1:29500", "a b:29500", "a/b:29500", "http://node0:29500", "a\0:1",
    "long" * 100 + ":29500", ".:1", "..:1", "a..b:1", "\udcff:1", "node0:٣", "node0:29500:29500", "*:1",
)  # fmt: skip
FOLDERS = (
    "logs", "config.yaml", "config.yaml/x", "/dev/null", "", "long" * 100, "\udcff", "a\0b", "new/deep", "loop",
    "/proc",
)  # fmt: skip
STARTED = (
    "train", "diagnose", "calibrate", "generate", "script.py", "trian", "launch", "report", "estimate", "export",
    "gone.py", "", ".", "-", "-m", "--", "config.yaml", "train.py", "long" * 100, "\udcff", "a\0b", "/dev/null",
)  # fmt: skip
OPTIONS: dict[str, tuple[str, ...]] = {
    "--ranks": NUMBERS, "--max-restarts": NUMBERS, "--nodes": NUMBERS, "--node-rank": NUMBERS, "--master": PLACES,
    "--logs": FOLDERS, "--stopped-code": NUMBERS, "--rank": NUMBERS, "--nproc-per-node": NUMBERS,
    "--node_rank": NUMBERS, "--config": ("config.yaml",), "-h": (), "--version": (),
}  # fmt: skip
WORLD = {
    "RANK": NUMBERS, "WORLD_SIZE": NUMBERS, "LOCAL_RANK": NUMBERS, "LOCAL_WORLD_SIZE": NUMBERS,
    "MASTER_ADDR": ("", " ", "node0", "long" * 100, "\udcff", "a b", "node0:1", "[::1]", "1.2.3.4.5", "a..b", "."),
    "MASTER_PORT": NUMBERS, "GROUP_RANK": NUMBERS, "GROUP_WORLD_SIZE": NUMBERS,
    "TORCHELASTIC_RESTART_COUNT": NUMBERS, "TORCHELASTIC_MAX_RESTARTS": NUMBERS, "TORCHELASTIC_RUN_ID": NUMBERS,
    "TORCHELASTIC_USE_AGENT_STORE": ("True", "true", "1", "", "x"),
    "SLURM_PROCID": NUMBERS, "SLURM_NTASKS": NUMBERS, "SLURM_STEP_NUM_TASKS": NUMBERS, "SLURM_LOCALID": NUMBERS,
    "SLURM_NODEID": NUMBERS, "SLURM_JOB_ID": NUMBERS, "SLURM_JOB_END_TIME": NUMBERS,
    "SLURM_TASKS_PER_NODE": ("2", "2(x3),1", "2(x", "", "x", ",", "1(x" + "9" * 30 + ")", "9" * 5000),
    "SLURM_JOB_NODELIST": ("one", "gpu[3-5,9]", "gpu[", "", ",", "[]"),
}  # fmt: skip
AROUND = {
    "OMP_NUM_THREADS": NUMBERS, "COLUMNS": NUMBERS, "LINES": NUMBERS, "TERM": ("", "dumb", "x"), "NO_COLOR": ("", "1"),
    "HOME": ("", "gone", "/dev/null"), "TMPDIR": ("", "gone", "config.yaml"),
    "XDG_CACHE_HOME": ("", "gone", "/proc", "config.yaml"),
    "LC_ALL": ("C", "x"), "TZ": ("x", ""), "CC": ("", "gone", "false"), "CUDA_VISIBLE_DEVICES": ("", "-1", "x"),
    "MEGATRON_FP8_STOPPED_CODE": NUMBERS, "CUDA_DEVICE_MAX_CONNECTIONS": NUMBERS, "NVTE_FUSED_ATTN": NUMBERS,
}  # fmt: skip


@st.composite
def launches(draw: st.DrawFn) -> list[str]:
    """Options of launch, what it starts, and what follows that."""
    words: list[str] = []
    for name in draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=5)):
        values = OPTIONS[name]
        value = draw(st.sampled_from(values)) if values else ""
        words += draw(st.sampled_from(([f"{name}={value}"], [name, value]))) if values else [name]
    started = draw(st.lists(st.sampled_from(STARTED), max_size=2))
    after = draw(
        st.lists(st.sampled_from((*WRITTEN, "--ranks=2", "--config=config.yaml", "--x", "-h")), max_size=2)
    )
    return [*words, *started, *after]


def settings(variables: dict[str, tuple[str, ...]], most: int) -> st.SearchStrategy[dict[str, str]]:
    names = st.lists(st.sampled_from(sorted(variables)), max_size=most, unique=True)
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries({n: st.sampled_from(variables[n]) for n in chosen})
    )


def started(*words: object) -> Heard:
    """A launch that would start ranks is done."""
    with mock.patch.object(launcher, "launch", return_value=0):
        return done_or_refused("launch", *words)


@draws(30, often=2, suppress_health_check=[FIXTURES])
@given(launches())
def test_any_words(originals, place, words):
    fresh(place, originals, "config.yaml")
    (place / "script.py").touch()
    (place / "loop").symlink_to("loop")
    started(*words)


def possible(environment: dict[str, str]) -> dict[str, str]:
    """Of an environment that NUL and half characters cannot be in."""
    return {name: value for name, value in environment.items() if "\0" not in value}


@draws(20, often=2)
@given(settings(WORLD, 8))
def test_any_environment_of_a_rank(environment):
    """A place in a launch, or a ValueError; without asking the network."""
    try:
        found = find_launch(environment)
    except ValueError as error:
        assert str(error)
        return
    assert 0 <= found.rank < found.world_size and 0 <= found.local_rank < found.local_world_size
    assert 0 < found.master_port < 2**16 and (found.world_size == 1 or is_host(found.master_addr))


@draws(3, often=2, suppress_health_check=[FIXTURES])
@given(settings(WORLD, 4), settings(AROUND, 4))
def test_a_run_in_any_environment(originals, place, world, around):
    """One rank trains, whatever the environment says of other things; ranks that would wait for others are left out."""
    try:
        if find_launch(world).world_size > 1:
            return
    except ValueError:
        pass
    fresh(place, originals, "corpus.txt", "config.yaml", "cache")
    with mock.patch.dict(os.environ, possible({**world, **around})):
        done_or_refused("train", "--config=config.yaml", "--run_dir=new", "--train.train_iters=1")


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--config=config.yaml"],
        ["--ranks=2", "--max-restarts=3", "script.py", "--x", "\udcff"],
        ["--nodes=2", "--node-rank=1", "--master=node0:29500", "--ranks", "8", "generate", "run"],
        ["--logs=logs", "--stopped-code=143", "train", "--train.train_iters=2"],
    ],
)
def test_what_is_meant_is_started(originals, place, words: list[Any]):
    """Else these tests would show nothing."""
    fresh(place, originals, "config.yaml")
    (place / "script.py").touch()
    assert started(*words).code == 0


def test_one_rank_trains(originals, place):
    fresh(place, originals, "corpus.txt", "config.yaml", "cache")
    with mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "1"}):
        done = done_or_refused("train", "--config=config.yaml", "--run_dir=new", "--train.train_iters=1")
    assert done.code == 0
