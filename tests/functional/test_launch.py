"""`megatron-fp8 launch`: exit codes, messages, signals, several nodes."""

import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.support.forking_interpreter import stood_for
from megatron_fp8.files.checkpoint import check_files, latest_checkpoint, read_manifest
from tests.support.command import TWO_RANKS, environment, launched

LIMIT_S = 150
"""Less than a test may take (with two such waits), and less than the ranks of SCRIPT sleep."""

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def note(*_):
    print("rank", rank, "saves", flush=True)
    sys.exit(0)
if sys.argv[1] == "saves":
    signal.signal(signal.SIGTERM, note)
elif sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("rank", rank, "node", os.environ["GROUP_RANK"], "of", os.environ["WORLD_SIZE"], "pid", os.getpid(), flush=True)
if sys.argv[1] in ("saves", "stubborn", "waits"):
    time.sleep(3600)
if sys.argv[1] == "killed together":  # as ranks that wait for each other
    came, died = Path(sys.argv[2]), Path(sys.argv[3])
    if not died.exists():
        if rank == 0:
            came.touch()
            time.sleep(3600)
        while not came.exists():
            time.sleep(0.02)
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
said = Path(__file__).with_name(f"rank 0 has spoken {attempt}")
if rank == 0:
    said.touch()
if sys.argv[1] in ("killed", "killed once") and rank == 1 and (sys.argv[1] == "killed" or not attempt):
    while not said.exists():  # else it may die before, by the launcher
        time.sleep(0.02)
    print("the last word", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "killed":
    time.sleep(3600)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def listening():
    """The suite may have been started in the background, which ignores Ctrl-C, or by nohup."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def by_nohup():
    listening()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@contextmanager
def started(folder, python, *command, name="launch", before=listening, **variables):
    """A launch that goes on meanwhile; its process, and a function that reads what it has said."""
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [python, "-m", "megatron_fp8", "launch", *map(str, command)],
            stdout=out, stderr=out, env=environment(**variables), cwd=folder,
            preexec_fn=before,
        )  # fmt: skip
    try:
        yield process, log.read_text
    finally:
        process.kill()
        process.wait()


def until(holds, said):
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, said()
        time.sleep(0.02)


def running(said, ranks=2):
    """Once all ranks have printed their line: process ids."""
    until(lambda: said().count(" pid ") == ranks, said)
    return [int(line.split()[-1]) for line in said().splitlines() if " pid " in line]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def rank_of(run_dir, rank=1):
    """The process id of a run's rank."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables, words = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"\0RANK=%d\0" % rank in b"\0" + variables and str(run_dir).encode() in words:
            return stood_for().get(int(entry.name), int(entry.name))
    raise AssertionError(f"{run_dir} has no rank {rank}")


# ------------------------------------------------------------------------------------------------- how ranks end


def test_bad_input_is_one_line_said_last_and_not_tried_again(folder, config, forking_python):
    out = folder / "runs" / "bad"
    refused = ["train", f"--config={config}", f"--run_dir={out}", *TWO_RANKS, "--data.tokenizer=no/such.json"]
    done = launched("--ranks=2", "--max-restarts=3", *refused, python=forking_python)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and "no/such.json" in done.stderr
    assert done.stderr.count("no/such.json") == 1 and "restart" not in done.stderr
    assert "Traceback" not in done.stderr and not out.exists()


def test_a_rank_that_dies_is_named_and_all_start_again(script, tmp_path, forking_python):
    """The second time there is no restart left."""
    logs = tmp_path / "logs"
    command = ["--ranks=2", "--max-restarts=1", f"--logs={logs}", script, "killed"]
    done = launched(*command, python=forking_python)
    assert done.returncode == 1
    restart, end = (line for line in done.stderr.splitlines() if "rank 1 was killed by SIGKILL" in line)
    assert restart.startswith("restart ") and restart.endswith("All ranks start again: restart 1 of 1.")
    folder = Path(end.partition("Its output is in ")[2].rstrip("."))
    assert end.startswith("error: ") and folder.parent.name == "attempt_1" and logs in folder.parents
    assert (folder / "stderr.log").read_text() == "the last word\n"
    assert done.stderr.count("[rank1]:the last word") == 2 and done.stdout.count("[rank0]:rank 0 node 0") == 2


# ------------------------------------------------------------------------------------------------------- signals


def test_a_signal_makes_ranks_save(script, tmp_path, forking_python):
    with started(tmp_path, forking_python, "--ranks=2", "--stopped-code=143", script, "saves") as (
        process,
        said,
    ):
        running(said)
        process.send_signal(signal.SIGHUP)
        assert process.wait(LIMIT_S) == 143, said()
    assert "SIGHUP: asked the ranks to finish" in said()
    assert "rank 0 saves" in said() and "rank 1 saves" in said() and "error" not in said()


@pytest.mark.parametrize(("told", "code"), [("the launcher", 0), ("one rank", 143)])
def test_ctrl_c_saves_a_training(folder, config, forking_python, told, code):
    """A rank may be told by a launcher on another node: its own launcher ends with the same code."""
    out = folder / "runs" / told
    command = ["--ranks=2", "--max-restarts=1", *([f"--stopped-code={code}"] if code else [])]
    command += ["train", f"--config={config}", f"--run_dir={out}", *TWO_RANKS]
    command += ["--train.train_iters=5000", "--train.log_interval=1", "--train.eval_interval=5000"]
    with started(folder, forking_python, *command) as (process, said):
        until(lambda: "\niteration     2/" in said(), said)
        if told == "one rank":
            os.kill(rank_of(out), signal.SIGTERM)
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == code, said()
    assert (
        "restart " not in said()
        and "stopped by SIGTERM after " in said().splitlines()[-1]
        and ", saved, " in said()
    )
    assert len(list((out / "checkpoints").glob("iter_*"))) == 1


def test_a_second_ctrl_c_ends_ranks_that_do_not_listen(script, tmp_path, forking_python):
    """And what nohup ignores stays ignored."""
    command = ["--ranks=2", "--max-restarts=1", script, "stubborn"]
    with started(tmp_path, forking_python, *command, before=by_nohup) as (process, said):
        pids = running(said)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGINT)
        until(lambda: "asked the ranks" in said(), said)
        time.sleep(1.2)
        assert process.poll() is None and all(map(alive, pids))
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130, said()
        until(lambda: not any(map(alive, pids)), said)
    assert "save and end; again, after 1 s or later: they end at once, unsaved" in said()
    assert said().splitlines()[-1] == "SIGINT: the ranks were ended, unsaved" and "SIGHUP" not in said()


def test_a_signal_before_ranks_can_save_is_no_failure(script, tmp_path, forking_python):
    with started(tmp_path, forking_python, "--ranks=2", "--max-restarts=2", script, "waits") as (
        process,
        said,
    ):
        running(said)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 143, said()
    assert said().splitlines()[-1] == "SIGTERM: the ranks ended before there was anything to save"


def test_ranks_do_not_outlive_their_launcher(script, tmp_path, forking_python):
    with started(tmp_path, forking_python, "--ranks=2", script, "saves") as (process, said):
        pids = running(said)
        os.kill(stood_for()[process.pid], signal.SIGKILL)
        until(lambda: not any(map(alive, pids)), said)
    assert "rank 0 saves" in said() and "rank 1 saves" in said()


# --------------------------------------------------------------------------------------------------------- nodes


def node(number, port, *more):
    return ["--nodes=2", f"--node-rank={number}", f"--master=127.0.0.1:{port}", "--ranks=1", *more]


def test_two_nodes_meet_and_start_again_together(script, tmp_path, forking_python, port):
    """Node 1 comes first, and its rank dies once."""
    command = ["--max-restarts=2", script, "killed together", tmp_path / "came", tmp_path / "died"]
    with (
        started(tmp_path, forking_python, *node(1, port, *command), name="one") as (one, of_one),
        started(tmp_path, forking_python, *node(0, port, *command), name="zero") as (zero, of_zero),
    ):
        assert [one.wait(LIMIT_S), zero.wait(LIMIT_S)] == [0, 0], of_one() + of_zero()
    assert "rank 1 node 1 of 2" in of_one() and "rank 0 node 0 of 2" in of_zero()
    assert "restart     rank 1 was killed by SIGKILL" in of_one()
    assert of_one().count("rank 1 node 1") == of_zero().count("rank 0 node 0") == 2


def test_a_training_ends_when_node_0_is_lost_and_names_its_checkpoint(folder, config, forking_python, port):
    """Its launcher and its rank are killed; both nodes can go on from what it had saved."""
    out = folder / "runs" / "node 0"
    command = ["--max-restarts=2", "train", f"--config={config}", f"--run_dir={out}", *TWO_RANKS]
    command += ["--train.train_iters=5000", "--train.eval_interval=5000", "--checkpoint.save_interval=2"]
    with (
        started(folder, forking_python, *node(0, port, *command), name="zero") as (zero, of_zero),
        started(folder, forking_python, *node(1, port, *command), name="one") as (one, of_one),
    ):
        until(lambda: (out / "checkpoints" / "latest").exists(), lambda: of_zero() + of_one())
        rank = rank_of(out)
        os.kill(stood_for()[zero.pid], signal.SIGKILL)
        os.kill(rank_of(out, 0), signal.SIGKILL)
        assert one.wait(LIMIT_S) == 1, of_one()
        assert not alive(rank)
    said = of_one()
    kept = latest_checkpoint(out / "checkpoints")
    check_files(kept, read_manifest(kept))
    of_the_rank, last = [line for line in said.splitlines() if line.startswith("error:")]
    assert "the connection to another rank was lost (" in of_the_rank and "Traceback" not in said
    assert of_the_rank.endswith(f"--resume=auto goes on from {kept}.")
    assert f"the launchers of 2 nodes at 127.0.0.1:{port}, lost each other" in last, said
    assert last.endswith(": look at node 0.")


def test_an_occupied_port_is_one_line_and_a_node_that_waits_can_be_stopped(
    script, tmp_path, forking_python, port
):
    with started(tmp_path, forking_python, *node(0, port, script, "waits"), name="zero") as (zero, of_zero):
        until(lambda: _listens(port), of_zero)
        done = launched(*node(0, port, script, "waits"), python=forking_python)
        assert done.returncode == 2, done.stderr
        assert f"error: this node cannot listen at --master 127.0.0.1:{port}" in done.stderr.splitlines()[-1]
        zero.send_signal(signal.SIGINT)  # while it waits for node 1
        assert zero.wait(LIMIT_S) == -signal.SIGINT, of_zero()
    assert of_zero() == f"waiting     for 2 nodes at 127.0.0.1:{port}, at most 10 minutes\n"


def _listens(port):
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0
