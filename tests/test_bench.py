"""The scripts of bench/ can import what they need: they run rarely, so a missing name would be noticed late."""

import ast
import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
SCRIPTS = sorted(BENCH.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_names_of_gptworks_exist(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gptworks"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


@pytest.mark.parametrize(
    ("text", "finished", "source", "right"),
    [
        ("def a(x):\n    return x\n\n\ndef b(", False, "def a(x):\n    return x\n\n\n", True),
        (
            "def a(\n    x,\n) -> int:\n\n    return x\nx = 1\n",
            False,
            "def a(\n    x,\n) -> int:\n\n    return x\n",
            True,
        ),
        ("def a(x):\n    y = x\n    return [y", False, "def a(x):\n    y = x\n", True),
        ("def a(x):\n    return [y", True, "def a(x):\n    return [y", False),
        ("def a(x):\n", False, "def a(x):\n", False),
        ("def a(x): return x; b = 1\n", True, "def a(x): return x; b = 1\n", True),
        ("def a\n    return x\n", True, "def a\n    return x\n", False),
        ("def a(x):\n    return '\0'\n", True, "def a(x):\n    return '\0'\n", False),
    ],
)
def test_a_function_is_cut_out_of_a_text_and_parsed(
    text: str, finished: bool, source: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    script = importlib.import_module("parse")
    assert script.first_function(text, finished) == source
    assert script.parses(source) is right
