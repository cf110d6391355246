"""Writes instructions with answers about the functions of Python's standard library, read from its own sources.

There are three kinds of answers, each with a fixed form: a docstring, a list of parameters, and a function's first
line. The same interpreter gives the same file.

    python bench/stdlib_instructions.py data/miniature/instructions.jsonl
"""

import ast
import json
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from gptworks.data.sources.code import stdlib_files

LONGEST_SIGNATURE = 100

Record = dict[str, str]

OPEN = "Write a docstring for this function."
"""The instruction whose answer does not follow from the question: the function's docstring is one of many possible."""

FORMS = {
    OPEN: re.compile(r'"""[^"\n]+\."""'),
    "List the parameters of this function.": re.compile(r"It takes none\.|- \*{0,2}\w+(\n- \*{0,2}\w+)*"),
    "Write the first line of this function.": re.compile(r"```python\ndef \w+\([^\n]*\):\n```"),
}
"""For each instruction, the pattern of its answers."""


def has_form(instruction: str, answer: str) -> bool:
    """Whether an answer has the form that answers to the instruction have."""
    form = next(form for start, form in FORMS.items() if instruction.startswith(start))
    return form.fullmatch(answer.strip()) is not None


def records() -> Iterator[Record]:
    """Yield one record per question; no question appears twice."""
    seen: set[str] = set()
    for function in _functions():
        for record in _records_of(function):
            question = record["instruction"] + record["input"]
            if question not in seen:
                seen.add(question)
                yield record


def _functions() -> Iterator[ast.FunctionDef]:
    for file in stdlib_files():
        try:
            with warnings.catch_warnings(action="ignore"):  # invalid escapes in old sources
                tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # the file is deliberately broken, or has another encoding
            continue
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _records_of(function: ast.FunctionDef) -> Iterator[Record]:
    document, parameters, first_line = FORMS
    names = _parameters(function.args)
    line = f"def {function.name}({ast.unparse(function.args)}):"
    if function.name.startswith("__") or len(line) > LONGEST_SIGNATURE:
        return
    summary = " ".join((ast.get_docstring(function) or "").split("\n\n")[0].split())
    if 15 <= len(summary) <= 100 and summary.endswith(".") and '"' not in summary and "\\" not in summary:
        yield {"instruction": document, "input": line, "output": f'"""{summary}"""'}
    listed = "\n".join(f"- {name}" for name in names) or "It takes none."
    yield {"instruction": parameters, "input": line, "output": listed}
    asked = f"name: {function.name}\nparameters: {', '.join(names) or 'none'}"
    plain = f"def {function.name}({', '.join(names)}):"
    yield {"instruction": first_line, "input": asked, "output": f"```python\n{plain}\n```"}


def _parameters(arguments: ast.arguments) -> list[str]:
    plain = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    some = [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    named = [argument.arg for argument in arguments.kwonlyargs]
    rest = [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return [*plain, *some, *named, *rest]


def pairs(rows: Iterable[Record]) -> Iterator[Record]:
    """Yield a pair for each instruction: its own answer is chosen; the answer to the previous instruction of the same
    kind, right in form but about another function, is rejected. An instruction without a previous one, or with the same
    answer, has no pair."""
    before: dict[str, str] = {}
    for row in rows:
        rejected = before.get(row["instruction"], row["output"])
        before[row["instruction"]] = row["output"]
        if rejected != row["output"]:
            yield {"instruction": row["instruction"], "input": row["input"]} | {
                "chosen": row["output"], "rejected": rejected
            }  # fmt: skip


def write(path: Path, rows: Iterable[Record]) -> int:
    """Write the file, unless it has these records already; return their number."""
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if not path.exists() or path.read_text(encoding="utf-8") != text:  # an unchanged file keeps its prepared data valid
        path.write_text(text, encoding="utf-8")
    return len(rows)


if __name__ == "__main__":
    print(f"{write(Path(sys.argv[1]), records()):,} instructions with answers")
