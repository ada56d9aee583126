"""A real SLURM on this machine: munged, slurmctld and slurmd processes on loopback, with private
ports and folders and without systemd. Needs Debian's packages slurm-wlm and munge, and root, since
slurmd refuses to start as anybody else's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.programs import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo")
# Where Debian puts programs for the administrator.
SBIN = "/usr/sbin:/sbin"
# What the busiest machine may take for a change of state, and for steps of training between two of
# them: where others have priority, such a run was seen to get 3 % of a core.
LONG_S = 800.0
TRAINING_S = 5000.0


def missing() -> str:
    """Why there can be no SLURM here, or ""."""
    path = f"{os.environ['PATH']}:{SBIN}"
    lacks = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    if lacks:
        return f"{', '.join(lacks)} not installed; on Debian: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "slurmctld and slurmd need root here"


@dataclasses.dataclass(frozen=True)
class Slurm:
    """A running SLURM. Partition low is the default, and high pre-empts its jobs."""

    folder: Path
    # Environment in which sbatch and the other clients find it.
    environment: dict[str, str]

    def run(self, *command: str | Path) -> str:
        """What a client prints. Raises AssertionError with its error, if it fails."""
        done = subprocess.run(
            list(map(str, command)), env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """The fields of ``scontrol show job``; of an array those of the task <array>_<task>."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).splitlines()[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, what: str, met: Callable[[], object], seconds: float = LONG_S) -> None:
        """Waits until ``met()``. Raises AssertionError with SLURM's logs if it never is."""
        deadline = time.monotonic() + seconds
        while not met():
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}\n{self.logs()}"
            time.sleep(0.1)

    def wait_for_end(self, number: str, seconds: float = LONG_S) -> dict[str, str]:
        """The job's fields when it has ended."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        ended = f"the end of job {number}"
        self.wait(ended, lambda: self.job(number)["JobState"] in ends, seconds)
        return self.job(number)

    def logs(self) -> str:
        """The ends of the daemons' logs, and the queue."""
        queue = subprocess.run(
            ["squeue", "--all"], env=self.environment, capture_output=True, text=True
        )
        logs = [
            f"--- {path.name}\n{path.read_text(errors='replace')[-2500:]}"
            for path in sorted((self.folder / "log").glob("*.log"))
        ]
        return "\n".join([queue.stdout, *logs])


@contextlib.contextmanager
def slurm(nodes: int = 2) -> Iterator[Slurm]:
    """Brings up a SLURM and ends all of it again, with whatever its jobs left running."""
    # sockets have short names, which a test's own folder may be too long for
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o711)
        for part in ("state", "log", "run", *(f"spool/n{i}" for i in range(nodes))):
            (folder / part).mkdir(parents=True, mode=0o755)
        (folder / "run").chmod(0o711)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        (folder / "slurm.conf").write_text(_conf(folder, nodes))
        environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:{SBIN}",
        }
        found = Slurm(folder, environment)
        try:
            _start(found, nodes)
            yield found
        finally:
            _stop(found)


def _start(found: Slurm, nodes: int) -> None:
    folder = found.folder
    found.run(
        *("munged", "--force", f"--key-file={folder}/munge.key"),
        *(f"--socket={folder}/run/munge.socket", f"--pid-file={folder}/run/munged.pid"),
        *(f"--log-file={folder}/log/munged.log", f"--seed-file={folder}/run/munge.seed"),
    )
    found.run("slurmctld", "-c")
    for i in range(nodes):
        found.run("slurmd", "-c", "-N", f"n{i}")

    def states() -> str:
        return subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%t", "-p", "low"],
            env=found.environment,
            capture_output=True,
            text=True,
        ).stdout

    found.wait("idle nodes", lambda: states().split() == ["idle"] * nodes)


def _stop(found: Slurm) -> None:
    """Ends the daemons and the processes of jobs, all of which know the private configuration."""
    mark = f"SLURM_CONF={found.folder / 'slurm.conf'}".encode()
    daemons = [
        int(path.read_text())
        for path in (found.folder / "run").glob("*.pid")
        if path.read_text().strip().isdigit()
    ]
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + 5
        while left := [pid for pid in {*daemons, *_with_environment(mark)} if _alive(pid)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def _with_environment(mark: bytes) -> list[int]:
    """Processes whose environment has this variable, but not this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def _conf(folder: Path, nodes: int) -> str:
    """slurm.conf for a controller and its nodes on one machine."""
    host = socket.gethostname().partition(".")[0]
    lines = [
        "ClusterName=loop",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={free_port()}",
        "AuthType=auth/munge",
        # a job comes back after four times this many seconds
        f"AuthInfo=socket={folder}/run/munge.socket,cred_expire=5",
        "CredType=cred/munge",
        "SlurmUser=root",
        "SlurmdUser=root",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/run/slurmctld.pid",
        f"SlurmdPidFile={folder}/run/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdLogFile={folder}/log/slurmd-%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "MpiDefault=none",
        "SwitchType=switch/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        # Nobody is given up because the machine is busy: neither a process that ends its step after
        # SIGTERM, nor a node or the start of a job.
        f"KillWait={TRAINING_S:.0f}",
        f"UnkillableStepTimeout={LONG_S:.0f}",
        f"BatchStartTimeout={LONG_S:.0f}",
        "MessageTimeout=100",
        "SlurmdTimeout=0",
        # a job that has ended is still asked for
        f"MinJobAge={4 * TRAINING_S:.0f}",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=bf_interval=1,bf_resolution=1,sched_interval=1,batch_sched_delay=0",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "AccountingStorageType=accounting_storage/none",
        *(
            f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 "
            "RealMemory=1000 State=UNKNOWN"
            for i in range(nodes)
        ),
        "PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1",
        "PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF",
    ]
    return "\n".join(lines) + "\n"
