"""Who a process is: torchrun's and SLURM's variables."""

import stat

import pytest

from megatron_fp8.train.launch.environment import Launch, find_launch

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7", "MASTER_PORT": "1234",
}  # fmt: skip


SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_NODELIST": "one", "SLURM_JOB_ID": "20007",
}  # fmt: skip


def test_torchrun():
    assert find_launch(TORCHRUN) == Launch("torchrun", 3, 4, 1, 2, "node7", 1234)


def test_torchrun_inside_a_slurm_job_is_torchrun():
    assert find_launch({**SLURM, **TORCHRUN}).launcher == "torchrun"


def test_slurm():
    assert find_launch(SLURM) == Launch("SLURM", 5, 6, 1, 2, "one", 10007)
    given = find_launch({**SLURM, "MASTER_ADDR": "here", "MASTER_PORT": "77"})
    assert (given.master_addr, given.master_port) == ("here", 77)


def test_slurm_step_counts_go_before_the_jobs():
    assert find_launch({**SLURM, "SLURM_STEP_NUM_TASKS": "8"}).world_size == 8
    mixed = {**SLURM, "SLURM_TASKS_PER_NODE": "4(x2),1", "SLURM_LOCALID": "0"}
    assert [find_launch({**mixed, "SLURM_NODEID": str(n)}).local_world_size for n in range(3)] == [4, 4, 1]


def test_a_local_rank_counts_where_nobody_says_how_many_there_are():
    """mpirun's wrappers and Kubernetes operators set no LOCAL_WORLD_SIZE; a step's list may be another part's."""
    without = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}
    assert find_launch(without).local_world_size == 2
    assert find_launch({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}).local_world_size == 2


def test_the_variables_that_tell_of_others_are_named_where_these_do_not_come():
    assert find_launch(TORCHRUN).variables == ("RANK=3", "WORLD_SIZE=4")
    assert find_launch({**SLURM, "SLURM_STEP_NUM_TASKS": "8"}).variables == (
        "SLURM_PROCID=5",
        "SLURM_STEP_NUM_TASKS=8",
    )
    assert find_launch({"PATH": "/bin"}) == Launch("one process") and find_launch({}).variables == ()


def test_the_first_host_of_a_node_list_comes_from_scontrol(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames gpu[3-5,9]" ] && printf "gpu3\\ngpu4\\ngpu5\\ngpu9\\n"\n'
    )
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert find_launch({**SLURM, "SLURM_JOB_NODELIST": "gpu[3-5,9]"}).master_addr == "gpu3"
    scontrol.unlink()
    with pytest.raises(ValueError, match=r"gpu\[3-5,9\].*Set MASTER_ADDR"):
        find_launch({**SLURM, "SLURM_JOB_NODELIST": "gpu[3-5,9]"})
    assert find_launch({**SLURM, "SLURM_JOB_NODELIST": "a1,a2"}).master_addr == "a1"


def test_a_list_of_more_nodes_than_there_are():
    """No memory is taken for them."""
    assert find_launch({**SLURM, "SLURM_STEP_TASKS_PER_NODE": f"2(x{'9' * 20})"}).local_world_size == 2


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TORCHRUN, "RANK": "x"}, "RANK='x' is not a number: launch with torchrun or srun, or unset it"),
        (
            {**TORCHRUN, "RANK": "4"},
            "RANK=4, WORLD_SIZE=4, rank 4 of 4 .* to run alone, unset these variables",
        ),
        (
            {**TORCHRUN, "LOCAL_RANK": "2"},
            "WORLD_SIZE=4, LOCAL_RANK=2, LOCAL_WORLD_SIZE=2, local rank 2 of 2 .* unset",
        ),
        ({**SLURM, "SLURM_PROCID": "6"}, "SLURM_PROCID=6, SLURM_NTASKS=6, rank 6 of 6"),
        (
            {"WORLD_SIZE": "2", "LOCAL_RANK": "1"},
            "has WORLD_SIZE='2', LOCAL_RANK='1' and no RANK: .* unset WORLD_SIZE and LOC",
        ),
        ({**TORCHRUN, "MASTER_ADDR": "a" * 64}, "is no host's name"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT=0 must be from 1"),
        ({"SLURM_PROCID": "0"}, "SLURM_NTASKS is missing"),
    ],
)
def test_environments_that_cannot_be(environ, words):
    with pytest.raises(ValueError, match=words):
        find_launch(environ)
