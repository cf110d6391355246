"""Commands shown for copying into a shell: any name in them is quoted as one word."""

import ast
import re
import shlex
from pathlib import Path

import pytest

import gptworks
from gptworks.errors import UserError
from gptworks.runs.bands import read_band

SOURCE = Path(gptworks.__file__).parent
COMMANDS = (
    "train|tune|fork|launch|data build|data show|inspect|evaluate|report|compare|generate|chat|serve|studio|export|"
    "quantize|import|sweep|try|init|plan|describe"
)
BEFORE_A_NAME = re.compile(rf"gptworks ({COMMANDS})( --[a-z-]+)* $")
QUOTED = ("quote(", "shlex.quote(")


def test_names_in_shown_commands_are_quoted() -> None:
    n_seen = 0
    for file in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        quoted = {  # names of what was quoted before
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(QUOTED)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            text = ""
            for part in node.values if isinstance(node, ast.JoinedStr) else ():
                if isinstance(part, ast.Constant):
                    text += str(part.value)
                    continue
                assert isinstance(part, ast.FormattedValue)
                shown = ast.unparse(part.value)
                if BEFORE_A_NAME.search(text):
                    n_seen += 1
                    assert shown.startswith(QUOTED) or shown in quoted, f"{file}:{part.lineno}: shlex.quote {shown}"
                text += "{}"
    assert n_seen >= 8


def test_a_hostile_name_is_one_word_of_the_command(tmp_path: Path) -> None:
    path = tmp_path / "my $(touch planted) `it`'s;\n.json"
    with pytest.raises(UserError) as refused:
        read_band(path)
    command = str(refused.value).partition(" no such band. `")[2].removesuffix("` makes one.")
    assert shlex.split(command) == ["gptworks", "compare", "--make-band", str(path), "RUN", "RUN", "RUN"]
