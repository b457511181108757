"""A real SLURM cluster on this one machine: munged, slurmctld and a slurmd per node, all state in one folder.

    with SlurmCluster(folder) as cluster:
        job = cluster.submit("examples/slurm/several_nodes.sbatch", "--nodes=2", CONFIG="small.yaml")
        cluster.wait(job, "RUNNING")

Debian's packages slurm-wlm and munge, and root. Two NodeNames share one NodeHostname and differ by port; `slurmd -N` says
which one a daemon is. The GPUs of the nodes are names only. Nothing outside `folder` is touched: the packages' own
configuration, key and daemons (if any) are left alone, and every process ends with the cluster.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "srun")
ROOT = Path(__file__).parents[2]
NODES = ("n1", "n2")
GPUS = 2

_SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
FirstJobId={first_job}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SwitchType=switch/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=100000,sched_interval=1,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=30
InactiveLimit=0
Waittime=0
GresTypes=gpu
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """What this machine lacks for a cluster: programs, or being root. Empty: nothing."""
    lacks = [name for name in PROGRAMS if shutil.which(name) is None]
    return lacks + ([] if os.geteuid() == 0 else ["root"])


class SlurmCluster:
    """The daemons of one cluster. Use as a context manager: whatever happens inside, all processes end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "TORCHELASTIC"))}
        self.environment = {**clean, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        try:
            self._configure()
            self._start_munge()
            self._start("slurmctld", "-D", "-i")
            for node in NODES:
                self._start_node(node)
            self._until(lambda: self._states() == ["idle"] * len(NODES), 60, "all nodes to be idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self._command("scancel", "--full", "--signal=KILL", "--user=root")
            self._until(lambda: not self._command("squeue", "--noheader"), 20, "jobs to end")
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        self._kill_leftovers()

    # ------------------------------------------------------------------------------------------- jobs

    def submit(self, script: str | Path, *options: str, arguments: tuple[str, ...] = (), **knobs: str) -> int:
        """sbatch; the job's number. `knobs` are environment variables, `arguments` those of the script."""
        said = self._command("sbatch", "--parsable", *options, str(script), *arguments, **knobs)
        return int(said.split(";")[0])

    def state(self, job: int) -> str:
        """The job's state in SLURM's words, such as PENDING, RUNNING, COMPLETED, FAILED."""
        return self.field(job, "JobState")

    def field(self, job: int, name: str) -> str:
        """One field of `scontrol show job`."""
        shown = self._command("scontrol", "--oneliner", "show", "job", str(job))
        found = re.search(rf"\b{name}=(\S+)", shown)
        assert found, f"job {job} has no {name}: {shown}"
        return found[1]

    def wait(self, job: int, *states: str, timeout: float = 60) -> str:
        """Wait until the job is in one of `states`; which."""
        self._until(lambda: self.state(job) in states, timeout, f"job {job} to be {' or '.join(states)}")
        return self.state(job)

    def command(self, *words: str) -> str:
        """Run one of SLURM's commands; its output. RuntimeError with what it said if it fails."""
        return self._command(*words)

    def logs(self) -> str:
        """The ends of all daemons' logs, for a failed test's message."""
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.folder.glob("*.log")))

    # ------------------------------------------------------------------------------------------ nodes

    def lose(self, node: str) -> None:
        """SIGKILL to everything of a node at once; the controller is told what it would find after SlurmdTimeout."""
        daemon = self._nodes.pop(node)
        self._daemons.remove(daemon)
        daemon.kill()
        daemon.wait()
        steps = f"SLURMD_NODENAME={node}\0", f"slurmstepd: [{node}"
        for process in {pid for text in steps for pid in processes_naming(text)}:
            if str(self.folder).encode() in _environment(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        self._command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def bring_back(self, node: str) -> None:
        """Start a lost node's daemon again, which registers itself: ReturnToService=2 makes the node available so."""
        self._start_node(node)
        self._until(lambda: not any(s.startswith("down") for s in self._states()), 60, f"{node} to be back")

    # ---------------------------------------------------------------------------------------- daemons

    def _start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node)
        self._nodes[node] = self._daemons[-1]

    def _configure(self) -> None:
        ports = free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 Gres=gpu:{GPUS} State=UNKNOWN"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        for name in ("state", "munge", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        # Scripts derive the ranks' port from the job's number: two clusters on one machine must not number alike.
        first_job = 1 + 64 * (os.getpid() % 300)
        conf = _SLURM_CONF.format(
            folder=self.folder, host=host, controller_port=ports[0], nodes=nodes, first_job=first_job
        )
        (self.folder / "slurm.conf").write_text(conf)
        for gpu in range(GPUS):
            (self.folder / f"gpu{gpu}").touch()
        (self.folder / "gres.conf").write_text(
            f"AutoDetect=off\nName=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n"
        )
        (self.folder / "cgroup.conf").write_text("")

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        folder.chmod(0o755)
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"key-file": key, "socket": folder / "socket", "pid-file": folder / "pid"}
        files |= {"log-file": folder / "munged.log", "seed-file": folder / "seed"}
        self._start("munged", "--foreground", "--force", *(f"--{k}={v}" for k, v in files.items()))
        self._until((folder / "socket").exists, 20, "munged's socket")

    def _start(self, *command: str) -> None:
        log = self.folder / f"{Path(command[0]).name}{len(self._daemons)}.out.log"
        with log.open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    stdout=out,
                    stderr=out,
                    stdin=subprocess.DEVNULL,
                    env=self.environment,
                    cwd=self.folder,
                    preexec_fn=_end_with_parent,
                )
            )

    def _states(self) -> list[str]:
        shown = subprocess.run(
            ["sinfo", "--Node", "--noheader", "--partition=low", "--format=%T"],
            env=self.environment, capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
        return shown.stdout.split()

    def _command(self, *words: str, **variables: str) -> str:
        done = subprocess.run(
            words,
            cwd=ROOT,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}\n{self.logs()}"
            )
        return done.stdout.strip()

    def _until(self, holds: object, timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while not holds():  # type: ignore[operator]
            for daemon in self._daemons:
                if daemon.poll() is not None:
                    raise RuntimeError(f"{daemon.args} ended with {daemon.returncode}\n{self.logs()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout} s for {what}\n{self.logs()}")
            time.sleep(0.1)

    def _kill_leftovers(self) -> None:
        """Kill what jobs left: every process whose environment or command line names this cluster's folder."""
        for process in processes_naming(str(self.folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _end_with_parent() -> None:
    """In a daemon before it starts: SIGKILL it when the test process dies without a word."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _environment(process: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/environ").read_bytes()
    return b""


def processes_naming(text: str) -> list[int]:
    """Processes but this one with `text` in their environment or command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if text.encode() in (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on, outside the range that outgoing connections take."""
    found: list[int] = []
    port = 20000 + os.getpid() % 10000
    while len(found) < count:
        port += 1
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.append(port)
    return found


if __name__ == "__main__":  # can a cluster run here?
    raise SystemExit(bool(missing()))
