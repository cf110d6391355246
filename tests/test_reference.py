"""docs/reference/ matches the present settings and commands."""

from docs.generate_reference import FOLDER, pages


def test_the_reference_is_current() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert written == pages(), "run `make reference`"
