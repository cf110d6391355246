"""gptworks in processes that lack what Windows or macOS lack (foreign_system.py). Nothing here ran on these systems."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


def failed_imports(done: subprocess.CompletedProcess[str]) -> set[str]:
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_every_module_can_be_imported_on_macos(tmp_path: Path) -> None:
    assert failed_imports(run("macos", folder=tmp_path)) <= OF_EXTRAS


def test_a_windows_user_gets_from_texts_to_an_exported_model_and_can_import_every_module(tmp_path: Path) -> None:
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
    assert failed_imports(done) <= OF_EXTRAS | ONLY_LINUX
