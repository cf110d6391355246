"""Runs a module of this folder in a new process, which reads its task from standard input and prints its result."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter

Asked = TypeVar("Asked")
Found = TypeVar("Found")


class ProcessFailed(Exception):
    """A process failed or took too long; the message says how it ended."""


def ask(
    module: str,
    *arguments: str,
    given: Any,
    returns: type[Found],
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Found:
    """Run a module of this folder, which calls `answer`, in a new Python; return its result for the task `given`.

    Args:
        environment: environment variables of the new process; by default, this process's variables.

    Raises:
        ProcessFailed: the process failed, with the last line of its errors, or took longer than `seconds`.
    """
    command = [sys.executable, "-m", f"gptworks.training.rehearsal.{module}", *arguments]
    task = TypeAdapter(type(given)).dump_json(given)
    try:
        result = subprocess.run(command, input=task, capture_output=True, check=False, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        raise ProcessFailed(f"it did not end within {seconds:g} seconds") from None
    if result.returncode:
        errors = result.stderr.decode(errors="replace").strip().splitlines()
        raise ProcessFailed((errors or [f"ended by signal {-result.returncode}"])[-1])
    return TypeAdapter(returns).validate_json(result.stdout)


def answer(asked: type[Asked], work: Callable[[Asked], Any]) -> None:
    """Read a task from standard input, and print the result of `work` on it. The new process calls this function."""
    found = work(TypeAdapter(asked).validate_json(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(TypeAdapter(type(found)).dump_json(found))
