"""No file of the package imports another in a cycle, even inside functions; imports for type checkers are exempt."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
}


def imported(node: ast.AST) -> set[str]:
    """Return the files of the package that a part of a file imports."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return set()
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    found = {name if name in FILES else name.rpartition(".")[0] for name in names} & FILES.keys()
    return found.union(*map(imported, ast.iter_child_nodes(node)))


def test_no_file_imports_in_a_circle() -> None:
    graph = {name: imported(ast.parse(path.read_text(encoding="utf-8"))) - {name} for name, path in FILES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
