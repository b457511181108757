"""Fixtures for all tests."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys

import torch
import torch.distributed as dist

# CUDA itself, once asked, works in no forked process.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
if not torch.cuda.is_available():
    # Triton kernels are interpreted; Triton's own functions are too, if it is told before anybody imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Iterator

import pytest

from benchmarks.support import forking_interpreter
from benchmarks.support.ranks import RankPool
from tests.support import order
from tests.support.process_state import left_behind, state
from tests.support.threads import threads
from tests.support.triton_interpreter import lean_interpreter

gc.disable()  # until tests are collected: what is imported and collected stays
THREADS = torch.get_num_threads()
IN_XDIST = "PYTEST_XDIST_WORKER" in os.environ
torch.set_num_threads(1)  # until then too: what files compute when they are imported starts no thread
lean_interpreter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-seconds", action="store_true", help="keep how long files of tests and unit tests took"
    )
    parser.addoption("--quick", action="store_true", help="leave out the slowest unit tests")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    # Else Inductor takes graphs that operators of an earlier commit have left on disk.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(config._tmp_path_factory.getbasetemp() / "inductor")  # type: ignore[attr-defined]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """pytest-xdist's processes begin with the longest files; in one process, files run in the order of their names."""
    if config.getoption("quick"):
        config.hook.pytest_deselected(items=order.leave_out_slow(items))
    if IN_XDIST:
        order.longest_first(items)


def pytest_collection_finish() -> None:
    """Cycles are looked for among what tests make: modules and 10,000 tests need not be gone through each time."""
    gc.freeze()
    gc.enable()
    if not IN_XDIST:  # there, more processes than cores would wait for each other
        torch.set_num_threads(THREADS)


atexit.register(gc.unfreeze)  # else libraries say at exit that their objects were leaked


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The slowest files, of those that ran."""
    reports = [
        r for found in terminalreporter.stats.values() for r in found if isinstance(r, pytest.TestReport)
    ]
    terminalreporter.section("slowest 10 files")
    for file, seconds in list(order.seconds_by(order.file_of, reports).items())[:10]:
        terminalreporter.write_line(f"{seconds:7.1f}s {file}")
    if terminalreporter.config.getoption("quick"):
        slow = len(json.loads(order.TABLE.read_text())["tests"])
        terminalreporter.write_line(
            f"{slow} unit tests of {order.SLOW_TEST_S:g} s and more are left to make test"
        )
    if terminalreporter.config.getoption("write_seconds"):
        order.write_table(reports)


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A file of tests that leaves something changed in this process fails by its name, not the file after it."""
    before = state()
    yield
    if accelerate := sys.modules.get("accelerate.state"):
        # A Trainer leaves its mixed precision and its open DataLoader to every later Accelerator of the process.
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.GradientState._reset_state()
    if left := left_behind(before):
        pytest.fail(f"{request.node.nodeid} leaves changed behind:\n" + "\n".join(left), pytrace=False)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(n).run(case, *args, timeout=120)`: gloo ranks shared by the whole session (benchmarks/support/ranks.py)."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def forking_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The path of a `python` that forks what it runs (benchmarks/support/forking_interpreter.py)."""
    with forking_interpreter.forking_python(tmp_path_factory.mktemp("python")) as path:
        yield path


@pytest.fixture
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
