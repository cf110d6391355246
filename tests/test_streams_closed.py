"""Commands with closed standard streams: they work, or fail with their own exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny


def closed(redirections: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    given = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "gptworks", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(given, capture_output=True, text=True, timeout=240, env=env, check=False)


@pytest.mark.parametrize("redirections", ["2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_a_command_works_and_fails_as_it_would(redirections: str, tmp_path: Path) -> None:
    recipe = tiny.write_recipe(tmp_path)
    before = recipe.read_bytes()
    done = closed(redirections, "describe", "gpt2-tiny")
    assert done.returncode == 0
    assert " >&-" in redirections or "parameters" in done.stdout
    assert closed(redirections, "plan", str(recipe), "model.n_layers=0").returncode == 2
    assert recipe.read_bytes() == before
