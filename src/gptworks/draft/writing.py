"""Write a recipe as a commented YAML file."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import yaml

from gptworks.errors import UserError

Row = tuple[str, Any, str]
"""A setting: its key, its value, and the reason for the value, which may be empty."""

_COMMENT_COLUMN, _WIDTH = 36, 120


def written(about: Iterable[str], sections: Mapping[str, Sequence[Row]]) -> str:
    """Return the text of a recipe's file: comments, then each section's settings with their reasons as comments. The
    section "" holds settings outside the others."""
    lines = [f"# {line}".rstrip() for line in about]
    for name, rows in sections.items():
        assert len({key for key, _, _ in rows}) == len(rows), "a key that is given twice makes the file invalid"
        indent = "  " if name else ""
        lines += ["", *([f"{name}:"] if name else [])]
        for key, value, why in rows:
            setting = f"{indent}{key}: {_flow(value)}"
            if isinstance(value, list) and value and isinstance(value[0], dict):
                setting = "\n".join([f"{indent}{key}:", *(f"{indent}  - {_flow(item)}" for item in value)])
            commented = f"{setting:<{_COMMENT_COLUMN - 2}}  # {why}"
            if not why:
                lines.append(setting)
            else:
                lines += [commented] if len(commented) <= _WIDTH else [f"{indent}# {why}", setting]
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """Return a value in YAML's flow style, on one line."""
    text = yaml.safe_dump([value], default_flow_style=True, width=inf, allow_unicode=True, sort_keys=False)
    return text.strip()[1:-1]


def check_new(path: Path) -> None:
    """Check, before long work, that a new file can be written at a path.

    Raises:
        UserError: the file exists, or its folder is missing.
    """
    if path.exists() or path.is_symlink():
        raise UserError(f"{path} exists, and it is not overwritten: give another file with -o.")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is not a folder: give a file in an existing folder with -o.")
