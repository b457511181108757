"""What the commands of one or several ranks share."""

from __future__ import annotations

from megatron_fp8.commands.on_checkpoint import _of_this_process
from megatron_fp8.train.launch.parallel import find_launch

BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7", "HOME": "/home"}


def test_a_batch_script_is_one_process_and_its_steps_are_several():
    """SLURM tells a batch script of all tasks, which only srun starts."""
    assert find_launch(_of_this_process(BATCH)).world_size == 1
    assert find_launch(_of_this_process({**BATCH, "SLURM_STEP_NUM_TASKS": "4"})).world_size == 4
    assert (
        find_launch(_of_this_process({**BATCH, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})).rank == 1
    )
    assert _of_this_process(BATCH)["HOME"] == "/home"
