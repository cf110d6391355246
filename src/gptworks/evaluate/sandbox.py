"""Programs that a model wrote, run in processes of their own, with little time, memory and nothing of the environment.

This keeps accidents in, not attacks: a process of the same user on the same machine can still read the user's files.
Whoever runs programs of a model should do so in a container or a virtual machine.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property
from pathlib import Path

from gptworks.errors import UserError

_CUT_OFF = ("unshare", "--user", "--map-root-user", "--net")

# The first argument is the program, the second what is written at its end, the third and fourth limits.
_CHILD = """
import os, resource, sys
path, proof, seconds, memory = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
for name, value in (("CPU", seconds), ("AS", memory), ("FSIZE", 1 << 20), ("CORE", 0), ("NOFILE", 64), ("NPROC", 0)):
    most = resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1]
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
out = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(null, stream)
with open(path, encoding="utf-8") as file:
    source = file.read()
sys.argv = [path]
try:
    exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
except BaseException as error:
    os.write(out, ("failed: " + type(error).__name__).encode("ascii", "replace"))
    os._exit(1)
os.write(out, proof.encode("ascii"))
os._exit(0)
"""


class Sandbox:
    """Runs programs. Linux and macOS; the network is cut off where the system lets a user do that (Linux).

    Raises:
        UserError: a system without resource limits.
    """

    def __init__(self, n_processes: int | None = None) -> None:
        if sys.platform == "win32":
            raise UserError("generated programs need the resource limits of Linux or macOS: run them there.")
        self.n_processes = n_processes or os.cpu_count() or 1

    @cached_property
    def cuts_off_network(self) -> bool:
        """Whether programs here have no network."""
        if shutil.which(_CUT_OFF[0]) is None:
            return False
        return subprocess.run([*_CUT_OFF, "true"], capture_output=True, check=False).returncode == 0

    def run_all(
        self,
        programs: Sequence[str],
        timeout_seconds: float,
        memory_mib: int,
        progress: object = None,
    ) -> list[str]:
        """Run Python programs, some at a time; for each: passed, timeout, or how it failed.

        A program has passed if it ran to its end without an exception. To leave early, with any exit code, is to fail.
        """
        with ThreadPoolExecutor(self.n_processes) as pool:
            running = {pool.submit(self.run, one, timeout_seconds, memory_mib): i for i, one in enumerate(programs)}
            outcomes = {}
            for future in as_completed(running):
                outcomes[running[future]] = future.result()
                if callable(progress):
                    progress(len(outcomes), len(programs))
        return [outcomes[i] for i in range(len(programs))]

    def run(self, program: str, timeout_seconds: float, memory_mib: int) -> str:
        """The outcome of one program."""
        proof = secrets.token_hex(16)
        with tempfile.TemporaryDirectory(prefix="gptworks-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "program.py"
            path.write_text(program, encoding="utf-8", errors="replace")
            limits = [str(int(timeout_seconds) + 1), str(memory_mib << 20)]
            command = [sys.executable, "-I", "-S", "-c", _CHILD, path.name, proof, *limits]
            process = subprocess.Popen(
                [*_CUT_OFF, "--", *command] if self.cuts_off_network else command,
                cwd=folder, env={"HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0"}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                told, _ = process.communicate(timeout=timeout_seconds)
            except subprocess.TimeoutExpired:
                told = b"timeout"
            finally:
                _kill_group(process)
        text = told.decode("ascii", "replace")
        if text == proof:
            return "passed"
        return text if text.startswith(("timeout", "failed: ")) else "failed: it ended early"


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Whatever is left of a program and of what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
