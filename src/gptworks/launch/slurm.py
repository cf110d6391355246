"""Job files for Slurm. Submit them with `sbatch`."""

import re
import shlex
import sys

from gptworks.errors import UserError
from gptworks.launch.job import Job, check_time
from gptworks.training.signals import UNFINISHED

SUFFIX = ".slurm"
SUBMIT = ("sbatch",)

_TEMPLATE = """\
#!/bin/bash
# Written by `gptworks launch --on slurm`.
@DIRECTIVES@

# Slurm sends SIGUSR1 before the time limit, and SIGTERM when it preempts the job. srun ends the job's processes at once
# after SIGTERM, but passes SIGUSR1 on to them: the run saves a checkpoint, and exits with @UNFINISHED@.
step=
save() { if [ -n "$step" ]; then kill -USR1 "$step"; fi; }
trap save USR1 TERM

@RENDEZVOUS@if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 @COMMAND@ &
step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a signal ends `wait`
wait "$step"
code=$?

# Continue later, unless someone has canceled the job.
if [ "$code" -eq @UNFINISHED@ ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

_RENDEZVOUS = """\
# The machines meet at the first: at its address in the network that leads to the last, and a port that is free there.
last=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n 1)
meet=$(@PYTHON@ -m gptworks.launch.meeting "$last") || exit
"""


def job_file(job: Job) -> str:
    """Return the text of a batch script.

    Raises:
        UserError: an option cannot be used with Slurm.
    """
    if job.time:
        check_time(job.time, r"[0-9]+(-[0-9]+)?(:[0-9]+){0,2}", "MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS")
    nodes = f"{job.least_nodes}-{job.most_nodes}" if job.is_elastic else str(job.most_nodes)
    asked = {"job-name": job.label, "nodes": nodes, "ntasks-per-node": "1"}
    if job.gpus:
        asked["gpus-per-node"] = f"{job.gpu_type}:{job.gpus}" if job.gpu_type else str(job.gpus)
    if job.time:
        asked["time"] = job.time
    asked |= {"signal": f"B:USR1@{job.grace_seconds}", "open-mode": "append"} | job.options
    directives = [f"#SBATCH --{key}={_directive(value)}" for key, value in asked.items()]
    directives += ["#SBATCH --requeue", *(["#SBATCH --no-kill"] if job.is_elastic else [])]
    several = job.most_nodes > 1
    python = shlex.quote(sys.executable)
    command = job.command(f"{job.least_nodes}:$SLURM_NNODES", '"$meet"' if several else None)
    texts = {
        "DIRECTIVES": "\n".join(directives),
        "UNFINISHED": str(UNFINISHED),
        "RENDEZVOUS": _RENDEZVOUS.replace("@PYTHON@", python) + "\n" if several else "",
        "COMMAND": f"{python} -m gptworks {command}",
    }
    return re.sub("@([A-Z]+)@", lambda found: texts[found[1]], _TEMPLATE)


def _directive(value: str) -> str:
    """Return a value as written after `#SBATCH --name=`: with special characters, in quotation marks. Raise UserError
    if the value has unprintable characters."""
    if not value.isprintable():
        raise UserError(f"{value!r} cannot be written into a line of a batch script: use printable characters.")
    if all(letter.isalnum() or letter in "._-:,@+/%=[]" for letter in value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
