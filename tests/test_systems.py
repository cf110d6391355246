"""gptworks in processes that lack what Windows or macOS lack (foreign_system.py). Nothing here ran on these systems."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny import write_recipe

FOREIGN = Path(__file__).with_name("foreign_system.py")
ONLY_LINUX = {"gptworks.confined.jail"}
"""A program that isolates itself with Linux's namespaces, and is never imported elsewhere."""
OF_EXTRAS = {"gptworks.data.datatrove", "gptworks.interop.lm_eval", "gptworks.kernels.triton_decoding",
             "gptworks.kernels.triton_loss"}  # fmt: skip
"""Modules that need a package which `make test` does not install."""


def run(system: str, *commands: str, folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", FOREIGN, system, *commands],
        cwd=folder, capture_output=True, text=True, encoding="cp1252", check=False,
        env=os.environ | {"PYTHONIOENCODING": "cp1252"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("system", ["windows", "macos"])
def test_every_module_can_be_imported_elsewhere(system: str, tmp_path: Path) -> None:
    failed = json.loads(run(system, folder=tmp_path).stdout)
    assert failed.keys() <= OF_EXTRAS | (ONLY_LINUX if system == "windows" else set())


def test_a_windows_user_gets_from_texts_to_an_exported_model(tmp_path: Path) -> None:
    """No file is renamed while it is open, no folder has a descriptor, no signal or module of Unix is there, and the
    output goes to a file in an old code page, which lacks the arrow and the minus that commands print."""
    write_recipe(tmp_path)
    done = run(
        "windows",
        "train tiny.yaml run_dir=runs/a train.max_steps=4 model.mlp=swiglu",
        "train tiny.yaml run_dir=runs/a train.max_steps=8 model.mlp=swiglu --resume --change train.max_steps",
        "fork runs/a runs/b train.learning_rate=0.002",
        "train tiny.yaml run_dir=runs/c train.max_steps=4 seed=3",
        "generate runs/a line --max-tokens 4",
        "evaluate runs/a",
        "compare runs/a runs/c",
        "quantize runs/a runs/d --weights int8",
        "export runs/a folder",
        "report runs/a",
        folder=tmp_path,
    )
    assert "?" in done.stderr + done.stdout, "in place of a character that the code page lacks"
    assert (tmp_path / "folder" / "model.safetensors").stat().st_size > 0
    assert not list(tmp_path.rglob(".writing-*"))


def test_windows_is_told_what_only_other_systems_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, FOREIGN, "windows", "launch demo --nproc 2"],
        cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "on Linux and macOS only" in done.stderr
