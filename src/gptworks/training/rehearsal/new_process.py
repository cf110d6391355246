"""Runs a module of this folder in a new process."""

import subprocess
import sys
from collections.abc import Mapping


class ProcessFailed(Exception):
    """A process failed or took too long; the message says how it ended."""


def output_of(
    module: str,
    *arguments: str,
    given: bytes,
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> bytes:
    """Run a module of this folder in a new Python with `given` as its input; return what it printed.

    Args:
        environment: its environment variables; None: this process's.

    Raises:
        ProcessFailed: the process failed, with the last line of its errors, or took longer than `seconds`.
    """
    command = [sys.executable, "-m", f"gptworks.training.rehearsal.{module}", *arguments]
    try:
        result = subprocess.run(
            command, input=given, capture_output=True, check=False, timeout=seconds, env=environment
        )
    except subprocess.TimeoutExpired:
        raise ProcessFailed(f"it did not end within {seconds:g} seconds") from None
    if result.returncode:
        errors = result.stderr.decode(errors="replace").strip().splitlines()
        raise ProcessFailed((errors or [f"ended by signal {-result.returncode}"])[-1])
    return result.stdout
