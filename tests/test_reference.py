"""docs/reference/ matches the present settings and commands."""

import re

from docs.generate_reference import FOLDER, pages


def test_the_reference_is_current() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert written == pages(), "run `make reference`"


def test_every_setting_and_option_has_a_meaning() -> None:
    for name, text in pages().items():
        column = 0
        for row in (re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")):
            cells = [cell.strip() for cell in row]
            if "meaning" in cells:
                column = cells.index("meaning")
            assert cells[column], (name, cells)
