"""docs/*.ipynb: the code calls existing functions, outputs are complete, and a kernel runs them all (`make
test-notebooks`)."""

import ast
import builtins
import copy
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gptworks

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs").glob("*.ipynb"))
MACHINE = re.compile(r"(?<![\w.])(?:/(?:home|root|work|tmp|opt|Users|private|mnt)/|[A-Z]:\\\\)|site-packages")
"""What a path of the machine on which a notebook ran looks like."""


def cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def kinds(cell: dict[str, Any]) -> set[str]:
    """Return the kinds of a cell's outputs: the types of displays, and the names of streams."""
    return {
        kind
        for output in cell["outputs"]
        for kind in (output["data"] if "data" in output else [output.get("name", output["output_type"])])
    }


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["fine_tuning", "first_model"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_code_of_a_notebook_calls_what_exists(path: Path) -> None:
    code = "".join("".join(cell["source"]) + "\n" for cell in cells(read(path)))
    tree, called = ast.parse(code), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gptworks":
            assert hasattr(gptworks, node.attr), f"gptworks.{node.attr}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("gptworks."):
            function = getattr(gptworks, ast.unparse(node.func).removeprefix("gptworks."))
            named = {each.arg: None for each in node.keywords if each.arg}
            inspect.signature(function).bind(*node.args, **named)
            called.add(node.func.attr if isinstance(node.func, ast.Attribute) else "")
    assert {"train", "load"} <= called
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored |= {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)
               for alias in node.names}  # fmt: skip
    stored |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    stored |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    read_names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - stored
    assert read_names <= set(dir(builtins)), read_names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_its_outputs_and_without_paths_of_a_machine(path: Path) -> None:
    notebook = read(path)
    numbers = [cell["execution_count"] for cell in cells(notebook)]
    assert numbers == list(range(1, len(numbers) + 1))
    shown: set[str] = set().union(*map(kinds, cells(notebook)))
    assert {"text/html", "text/plain", "stdout"} <= shown and "error" not in shown and "stderr" not in shown
    assert not MACHINE.search(json.dumps(notebook, ensure_ascii=False))
    assert path.stat().st_size < 300_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_installs_gptworks_in_colab_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: ran.append(command))
    code = "".join(cells(read(path))[0]["source"])
    exec(code, {})
    assert not ran
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    exec(code, {})
    assert [command[1:] for command in ran] == [["-m", "pip", "install", "--quiet", "gptworks"]]


@pytest.mark.notebooks
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_kernel_runs_a_notebook_in_an_empty_folder(path: Path, tmp_path: Path) -> None:
    """GPTWORKS_KEEP_NOTEBOOKS=1 writes the outputs into docs/ instead of comparing their kinds."""
    import nbformat
    from nbclient import NotebookClient

    kept = nbformat.read(path, as_version=4)
    run = copy.deepcopy(kept)
    NotebookClient(
        run, timeout=1200, record_timing=False, coalesce_streams=True, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    if os.environ.get("GPTWORKS_KEEP_NOTEBOOKS"):
        run.metadata = kept.metadata
        nbformat.write(run, path)
        return
    for before, after in zip(cells(kept), cells(run), strict=True):
        assert kinds(after) == kinds(before), "".join(before["source"])
    shown = json.dumps([cell["outputs"] for cell in cells(run)], ensure_ascii=False)
    assert str(tmp_path) not in shown and f"{Path.home()}/" not in shown
