"""The scripts of bench/ find what they import: they run seldom, so a name that is gone would be noticed late."""

import ast
import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted(Path(__file__).parent.parent.joinpath("bench").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_names_of_gptworks_exist(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gptworks"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
