"""A recipe as a commented YAML file."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gptworks.errors import RunError, UserError
from gptworks.files import write_whole

Row = tuple[str, Any, str]
"""A setting: its key, its value, and the reason for it, or nothing."""

_COMMENT_COLUMN, _WIDTH = 36, 120


def written(about: Iterable[str], sections: Mapping[str, Sequence[Row]]) -> str:
    """The recipe's file: comments, then each section's settings with the reasons beside them. A section with no name
    holds settings outside the others."""
    lines = [f"# {line}".rstrip() for line in about]
    for name, rows in sections.items():
        indent = "  " if name else ""
        lines += ["", *([f"{name}:"] if name else [])]
        for key, value, why in rows:
            setting = f"{indent}{key}: {_flow(value)}"
            if isinstance(value, list) and value and isinstance(value[0], dict):
                setting = "\n".join([f"{indent}{key}:", *(f"{indent}  - {_flow(item)}" for item in value)])
            beside = f"{setting:<{_COMMENT_COLUMN - 2}}  # {why}"
            if why and len(beside) > _WIDTH:
                lines.append(f"{indent}# {why}")
            lines.append(beside if why and len(beside) <= _WIDTH else setting)
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """A value in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./-]*", value) and value.lower() not in _NOT_STRINGS:
        return value
    return json.dumps(value, ensure_ascii=False)


_NOT_STRINGS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet.

    Raises:
        UserError: there is one, or no folder to write it to.
        RunError: the disk is full, fails or refuses; nothing is left of the file then.
    """
    try:
        write_whole(path, text, new=True)
    except (UserError, RunError):
        check_new(path)
        raise


def check_new(path: Path) -> None:
    """Refuse a path that `write_new` would refuse, before long work.

    Raises:
        UserError: see `write_new`.
    """
    if path.exists() or path.is_symlink():
        raise UserError(f"{path} exists, and it is not overwritten: give another file with -o.")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is no folder: give a file in one that exists with -o.")
