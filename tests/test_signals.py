"""Signals that stop a run: what the first does, and the next."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with SIGINT ignored
from gptworks.training.signals import stop_signals
with stop_signals() as asked:
    for number in sys.argv[1:]:
        signal.raise_signal(getattr(signal, number))
        print(asked(), flush=True)
"""


def outcome(*signals: str) -> tuple[int, list[str]]:
    """The exit code of a process that catches these signals, and what it was asked for after each."""
    result = subprocess.run([sys.executable, "-c", PROGRAM, *signals], capture_output=True, text=True, check=False)
    return result.returncode, result.stdout.split()


@pytest.mark.parametrize(
    ("signals", "code", "asked"),
    [
        (["SIGTERM"], 0, ["SIGTERM"]),
        (["SIGTERM", "SIGTERM"], -signal.SIGTERM, ["SIGTERM"]),
        (["SIGINT", "SIGTERM"], -signal.SIGTERM, ["SIGINT"]),  # an impatient user
        (["SIGTERM", "SIGINT"], -signal.SIGINT, ["SIGTERM"]),
        (["SIGUSR1", "SIGTERM"], 0, ["SIGUSR1", "SIGUSR1"]),  # Slurm's notice, and the end of the job's time
        (["SIGUSR1", "SIGTERM", "SIGTERM"], -signal.SIGTERM, ["SIGUSR1", "SIGUSR1"]),
        (["SIGTERM", "SIGUSR1"], 0, ["SIGTERM", "SIGTERM"]),  # Slurm's SIGTERM, and the batch script's notice of it
    ],
)
def test_a_second_stop_ends_the_process_at_once_and_a_notice_never_does(
    signals: list[str], code: int, asked: list[str]
) -> None:
    assert outcome(*signals) == (code, asked)
