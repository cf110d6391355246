"""Run programs that a model wrote, in processes that Linux namespaces isolate from the machine (jail.py).

Guaranteed: a program has no network and no files except the interpreter and the system's libraries, both read-only, and
a folder in memory with a size limit. It runs as nobody, cannot start processes, has limits of time, memory and file
sizes, and is killed when its time is over. A seccomp filter refuses system calls that these limits do not cover (for
System V shared memory and queues) or that read the caller's keyrings. Without namespaces and filter, no program is run.

Not guaranteed: tests and program share an interpreter, so a program that targets this harness can claim to have passed.
A fixed output is not enough for this: a random token confirms the program's end, and the parent makes this token only
after the program has reported its end. Kernels have bugs: run malicious programs in a virtual machine.
"""

import contextlib
import os
import secrets
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from gptworks.errors import UserError
from gptworks.machine import usable_cpus

DISK_BYTES = 16 << 20
_MOST_REPLY_BYTES = 4096
_LAST_SECONDS = 10.0


class Sandbox:
    """Runs programs isolated from the machine; only on Linux. Raises UserError if the system does not allow the
    isolation."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise UserError(
                "generated programs run only on Linux, whose namespaces isolate them: use a virtual machine or a "
                "container with Linux."
            )
        if (outcome := self.run("pass", 20.0, 512)) != "passed":
            raise UserError(
                f"this system does not allow the isolation of generated programs ({outcome}), so they are not run. "
                f"They need user, mount, pid and network namespaces: allow them "
                f"(sysctl kernel.unprivileged_userns_clone=1 or kernel.apparmor_restrict_unprivileged_userns=0; for a "
                f"container, --security-opt seccomp=unconfined), or use a virtual machine."
            )

    def run_all(
        self,
        programs: Sequence[str],
        timeout_seconds: float,
        memory_mib: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[str]:
        """Run Python programs in parallel, and return the outcomes: passed, timeout, failed: REASON or refused: REASON.

        A program passes if it runs to its end without an exception. An early exit fails, with any exit code.
        """
        outcomes: list[str] = []
        with ThreadPoolExecutor(usable_cpus()) as pool:
            for outcome in pool.map(lambda one: self.run(one, timeout_seconds, memory_mib), programs):
                outcomes.append(outcome)
                progress(len(outcomes), len(programs))
        return outcomes

    def run(self, program: str, timeout_seconds: float, memory_mib: int) -> str:
        """Run one program and return its outcome; see `run_all`."""
        from gptworks.confined import jail  # jail imports modules that only Linux has

        source = program.encode("utf-8", "replace")
        limits = [str(int(timeout_seconds) + 1), str(memory_mib << 20), str(DISK_BYTES)]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", jail.__file__, *limits],
            cwd="/", env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            deadline = time.monotonic() + timeout_seconds
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(len(source).to_bytes(8, "big") + source)
                process.stdin.flush()
            reply, token = b"", None
            while (part := _read(process.stdout.fileno(), deadline)) and len(reply) < _MOST_REPLY_BYTES:
                reply += part
                if reply == b"?" and token is None:
                    token = secrets.token_hex(16).encode("ascii")
                    with contextlib.suppress(BrokenPipeError):
                        process.stdin.write(token)
                        process.stdin.flush()
            if part is None:
                return "timeout"
            if token is not None and reply == b"?" + token:
                return "passed"
            if reply.startswith(b"failed: "):
                return reply.decode("ascii", "replace")
            with contextlib.suppress(subprocess.TimeoutExpired):  # the program may have closed its pipe and still run
                process.wait(max(0.1, deadline - time.monotonic()))
            if process.returncode == jail.REFUSED:
                return f"refused: {process.stderr.read(500).decode('utf-8', 'replace').strip()}"
            return "failed: it ended early"
        finally:
            process.terminate()  # jail.py then kills the program and ends
            try:
                process.wait(_LAST_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()  # all processes of the namespace die with it
                process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def _read(descriptor: int, deadline: float) -> bytes | None:
    """Return the next bytes of a pipe; b"" if the other side has closed it, None after the deadline."""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            return None
    return os.read(descriptor, _MOST_REPLY_BYTES)
