"""Stopping on request: who asked, what all ranks agree on, and when a job's time is over."""

import os
import signal
import subprocess
import sys

import pytest

from megatron_fp8.train.stop import AGAIN_S, REASONS, STOPPED_CODE, StopRequest

JOB = {"SLURM_JOB_START_TIME": "10000", "SLURM_JOB_END_TIME": "13600"}


@pytest.fixture(autouse=True)
def handlers():
    """The test process keeps its own handlers."""
    before = {signal.Signals[name]: signal.getsignal(signal.Signals[name]) for name in REASONS[:4]}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes the suite ignore it
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", REASONS[:4])
def test_a_signal_is_noted_as_often_as_it_comes_and_ends_nothing(name):
    stop = StopRequest({})
    stop.listen(name)
    assert not any(stop.votes()) and stop.reason is None
    for _ in range(3):
        os.kill(os.getpid(), signal.Signals[name])
    assert stop.votes() == [float(reason == name) for reason in REASONS]
    assert stop.reason is None  # nothing is agreed yet


def test_a_signal_while_python_shuts_down_ends_nothing():
    """An object of the main module's dies after Python has given its handlers up."""
    program = """
import os, signal
from megatron_fp8.train.stop import StopRequest

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)
        print("told", flush=True)

last = Last()
StopRequest({}).listen("SIGTERM")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "told\n"), done.stderr


def test_ctrl_c_again_ends_the_process_and_the_same_one_twice_does_not(capfd):
    """A terminal and torchrun both give a rank SIGINT for one Ctrl-C."""
    now = 5.0
    stop = StopRequest({}, steady=lambda: now)
    stop.listen("SIGINT", "it saves")
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        now += AGAIN_S / 4
    assert stop.votes()[REASONS.index("SIGINT")] == 1.0
    now += AGAIN_S
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == "\nit saves\n"  # once


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_what_is_ignored_from_the_start_stays_ignored(name):
    """As Ctrl-C in what a script starts in the background, and a closed terminal in what nohup starts."""
    signal.signal(signal.Signals[name], signal.SIG_IGN)
    stop = StopRequest({})
    stop.listen(name)
    os.kill(os.getpid(), signal.Signals[name])
    assert not any(stop.votes())


def test_the_first_reason_that_any_rank_has_counts_and_stays():
    stop = StopRequest({})
    stop.agree([0.0] * 6)
    assert stop.reason is None
    stop.agree([0.0, 3.0, 0.0, 0.0, 1.0, 1.0])
    assert stop.reason == "SIGUSR1"
    stop.agree([5.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert stop.reason == "SIGUSR1"


@pytest.mark.parametrize(
    ("environ", "now", "over"),
    [
        (JOB, 13479, False),
        (JOB, 13480, True),  # two minutes before the end
        ({**JOB, "SLURM_JOB_END_TIME": "10300"}, 10270, True),  # a tenth of a short job
        ({}, 99999, False),
    ],
)
def test_the_time_limit_is_a_reason_where_it_is_known(environ, now, over):
    assert StopRequest(environ, clock=lambda: now).votes() == [0.0, 0.0, 0.0, 0.0, float(over), 0.0]


@pytest.mark.parametrize(
    ("saves", "left"),
    [
        ([100.0, 300.0], 600),  # twice the save
        ([300.0, 10.0], 600),  # which may take as long again
        ([5000.0], 1800),  # half of the job
    ],
)
def test_the_time_limit_leaves_time_for_a_save_as_long_as_the_last_ones(saves, left):
    now = {"steady": 0.0}
    stop = StopRequest(JOB, clock=lambda: 10_000, steady=lambda: now["steady"])
    for seconds in saves:
        stop.saved_in(seconds)
    for at, over in ((3600 - left - 1, 0.0), (3600 - left, 1.0)):
        now["steady"] = at
        assert stop.votes()[4] == over
    unlimited = StopRequest({})
    unlimited.saved_in(5000.0)
    assert unlimited.votes()[4] == 0.0


def test_a_clock_that_is_set_moves_no_time_limit():
    now = {"clock": 13_000, "steady": 5.0}
    stop = StopRequest(JOB, clock=lambda: now["clock"], steady=lambda: now["steady"])
    now["clock"] += 86_400
    for seconds, over in ((479, 0.0), (1, 1.0)):
        now["steady"] += seconds
        assert stop.votes() == [0.0, 0.0, 0.0, 0.0, over, 0.0]


def test_what_a_stopped_run_ends_with_is_as_told():
    assert StopRequest({}).exit_code == 0 and StopRequest({STOPPED_CODE: "143"}).exit_code == 143
    for wrong in ("-1", "256", "x"):
        with pytest.raises(ValueError, match=f"{STOPPED_CODE}='{wrong}' must be from 0 to 255"):
            StopRequest({STOPPED_CODE: wrong})


def test_a_time_limit_that_is_no_number_is_named():
    for end in ("soon", "nan"):
        with pytest.raises(ValueError, match=rf"SLURM_JOB_END_TIME='{end}'.*Unset them"):
            StopRequest({**JOB, "SLURM_JOB_END_TIME": end})
