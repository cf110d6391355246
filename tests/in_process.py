"""Runs the command line in the test's process."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gptworks.cli import main

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """A function that runs the command line in this process, and returns the exit code and standard error."""

    def run(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["gptworks", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capfd.readouterr().err

    return run
