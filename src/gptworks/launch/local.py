"""Starts the ranks of this machine, for users and for jobs on a cluster."""

from gptworks.errors import UserError, refuse_unused
from gptworks.launch.job import Job
from gptworks.training.distributed.agent import Agent
from gptworks.training.distributed.rendezvous import DEFAULT_PORT, Machines, ThisMachine, check_host
from gptworks.units import whole_number


def check_local(job: Job, nodes: str, rendezvous: str | None, resume: bool) -> tuple[str, int]:
    """Return the host and the port at which the machines meet; ("", 0) if there is one machine.

    Args:
        nodes, rendezvous: the options, as given.

    Raises:
        UserError: the address is missing, has another form, is a loopback address, or is given for one machine; or
            several machines start without `resume`.
    """
    if job.most_nodes == 1:
        if ":" not in nodes:  # 1:1 means an elastic job that has one machine
            refuse_unused("is for several machines: give --nodes N, or", rendezvous=rendezvous)
        return "", 0
    if rendezvous is None:
        raise UserError(
            f"--nodes {job.most_nodes} needs --rendezvous HOST:PORT, the address of the first machine: run the same "
            f"command on each. --on slurm, skypilot and kubeflow write jobs that do so."
        )
    if not resume:
        raise UserError(
            f"--nodes {job.most_nodes} needs --resume: a machine that starts later, or again, continues the run's last "
            f"checkpoint. A new run starts at step 0 with it too."
        )
    host, _, port = rendezvous.rpartition(":") if ":" in rendezvous else (rendezvous, "", str(DEFAULT_PORT))
    host = host.strip("[]")
    number = whole_number(port) or 0
    if not (host and 0 < number < 1 << 16):
        raise UserError(f"--rendezvous {rendezvous} is not HOST:PORT with a port from 1 to 65535.")
    check_host(host)
    return host, number


def run_local(job: Job, run_id: str, host: str, port: int, resume: bool) -> int:
    """Start the job's ranks of this machine and wait for them; return the exit code, see `Agent.run`."""
    flags = ["--resume"] if resume or job.restarts else []
    flags += ["--force"] if job.force else []
    flags += [f"--change={key}" for key in job.change]
    place = Machines(host, port, job.least_nodes, job.most_nodes, run_id) if host else ThisMachine()
    return Agent(job.nproc, ["train", *flags, "--", job.recipe, *job.overrides], place, job.restarts).run()
