"""What `megatron-fp8 launch` refuses before it starts anything, each in one line with the remedy."""

from contextlib import suppress

import pytest

from megatron_fp8.commands.launch import _OWN, _address, _parser
from megatron_fp8.commands.main import main

NODES = ["--nodes=2", "--node-rank=1", "--master=a:1"]
SCRIPT = __file__

REFUSED = {
    "nothing to start": ([], "train, diagnose, calibrate, generate and import run on several ranks"),
    "no ranks": (["--ranks=0", "train"], "--ranks 0 must be from 1 to 1024"),
    "no number": (["--ranks=abc", "train"], "invalid int value: 'abc'"),
    "too many": (["--ranks=100000", "train"], "--ranks 100000 must be"),
    "an option of another name": (["--rank=2", "train"], "unrecognized arguments: --rank=2"),
    "a misspelt command": (["trian"], "Did you mean 'train'?"),
    "no such script": (["no/such.py"], "'no/such.py' is neither"),
    "a command of one process": (["report", "a b"], "run megatron-fp8 report 'a b'."),
    "restarts": (["--max-restarts=-1", "train"], "--max-restarts -1 must be 0 or more"),
    "a code": (["--stopped-code=256", "train"], "--stopped-code 256 must be from 3 to 255"),
    "a code of failures": (["--stopped-code=2", "train"], "1 and 2 are failures"),
    "a place without nodes": (["--master=a:1", "train"], "add --nodes N, or leave it out"),
    "nodes without a place": (["--nodes=2", "train"], "--node-rank R (0 to 1, this node's) and --master HOST:PORT"),
    "a port too high": ([*NODES, "--master=a:65536", "train"], "--master a:65536 must be HOST:PORT"),
    "an option too late": (["train", "--config=x", "--ranks", "2"], "--ranks is launch's own, and stands behind train"),
    "a number of many digits": ([*NODES, f"--master=a:{'9' * 5000}", "train"], "must be HOST:PORT"),
    "logs in a file": ([f"--logs={__file__}", SCRIPT], "give another folder by --logs"),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "gpus", "said"), [(3, 0, True), (2, 0, False), (3, 4, False)])
def test_more_ranks_than_cores_is_said_before_they_start(monkeypatch, capsys, ranks, gpus, said):
    monkeypatch.setattr("megatron_fp8.commands.launch.usable_cores", lambda: 2)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("megatron_fp8.train.launch.launcher.launch", lambda launching, debug: launching.ranks)
    assert main(["launch", f"--ranks={ranks}", SCRIPT]) == ranks
    assert ("3 ranks share 2 CPU cores" in capsys.readouterr().err) is said


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case, capsys):
    arguments, said = REFUSED[case]
    assert main(["launch", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line


@pytest.mark.parametrize(
    ("text", "place"),
    [("a:1", ("a", 1)), ("10.0.0.1:29500", ("10.0.0.1", 29500)), ("[fe80::1]:29500", ("fe80::1", 29500))],
)
def test_places(text, place):
    assert _address(text) == place


def test_options_in_the_wrong_place_are_all_of_its_own():
    known = {option for action in _parser()._actions for option in action.option_strings}
    assert known - {"-h", "--help", "--debug"} == _OWN


@pytest.mark.parametrize("command", ["train", "generate", "import"])
def test_a_text_is_said_by_one_process(command, capsys):
    with suppress(SystemExit):
        assert main(["launch", "--ranks=8", command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: megatron-fp8 {command} ")
