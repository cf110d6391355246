"""A Slurm cluster of this machine, for tests: munge, a controller and a node, with their files in one folder."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={controller}
SlurmdPort={node}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=1,sched_min_interval=0
ReturnToService=2
KillWait=30
MessageTimeout=100
BatchStartTimeout=600
MailProg=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes={host} Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=600
PartitionName=high Nodes={host} State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """The reason why no cluster can be started here."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"Slurm is not installed: no {', '.join(missing)} (apt-get install slurm-wlm)"
    return None if os.geteuid() == 0 else "Slurm's daemons need root here"


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands talk to the cluster."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    folder.chmod(0o755)
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(folder=folder, host=host, cpus=os.cpu_count(), controller=_free_port(), node=_free_port())
    )
    environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
    daemons = []

    def start(*words: str) -> None:
        with (folder / f"{words[0]}.out").open("wb") as out:
            daemons.append(subprocess.Popen(words, env=environment, stdout=out, stderr=out))

    try:
        start(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
        )  # fmt: skip
        until((folder / "munge.socket").exists)
        start("slurmctld", "-D")
        start("slurmd", "-D", "-N", host)
        until(lambda: "idle" in slurm(environment, "sinfo", "--noheader", "--format=%t"))
        yield environment
    finally:
        subprocess.run(["scancel", "--user=root"], env=environment, capture_output=True, check=False)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()
            daemon.wait()


def slurm(environment: dict[str, str], *words: str) -> str:
    """What one of Slurm's commands prints; its error if it fails."""
    result = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=600)
    return result.stdout if result.returncode == 0 else result.stderr


def until(condition: Callable[[], object]) -> None:
    """Wait until a function returns true, for as long as a busy machine may take."""
    deadline = time.monotonic() + 900
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.1)
