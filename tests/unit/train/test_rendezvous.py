"""Restarted ranks meet each other, and not the dead."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_fp8.train.rendezvous import attempt_store, check_restarts

TORCHRUN = {
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip
TIMEOUT = timedelta(seconds=10)


def test_an_attempt_does_not_see_what_an_earlier_one_wrote():
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    environ = {**TORCHRUN, "MASTER_PORT": str(agent.port)}
    first = attempt_store({**environ, "TORCHELASTIC_RESTART_COUNT": "0"}, 2, TIMEOUT)
    first.set("address of rank 0", "of the dead")
    again = attempt_store({**environ, "TORCHELASTIC_RESTART_COUNT": "0"}, 2, TIMEOUT)
    assert again.get("address of rank 0") == b"of the dead"
    second = attempt_store({**environ, "TORCHELASTIC_RESTART_COUNT": "1"}, 2, TIMEOUT)
    assert not second.check(["address of rank 0"])


def test_one_process_needs_no_port_and_srun_no_store_of_ours():
    assert isinstance(attempt_store({}, 1, TIMEOUT), dist.HashStore)
    assert attempt_store({"SLURM_PROCID": "0"}, 2, TIMEOUT) is None


def test_restarts_on_several_nodes_need_a_store_that_is_not_shared():
    check_restarts(TORCHRUN)
    several = {**TORCHRUN, "GROUP_WORLD_SIZE": "2"}
    with pytest.raises(ValueError, match=r"max-restarts=3.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        check_restarts(several)
    check_restarts({**several, "TORCHELASTIC_MAX_RESTARTS": "0"})
    check_restarts({**several, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    check_restarts({})
