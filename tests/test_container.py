"""The Dockerfile finds what it copies, and copies what building a wheel reads."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_image_is_built_from_files_that_are_there_and_not_ignored() -> None:
    lines = [line.split() for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()]
    copied = {
        name for words in lines if words[:1] == ["COPY"] and not words[1].startswith("--") for name in words[1:-1]
    }
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for name in copied:
        verdicts = [not rule.startswith("!") for rule in ignored if fnmatch(name, rule.removeprefix("!"))]
        assert (ROOT / name).exists() and not verdicts[-1], name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"pyproject.toml", "setup.py", "src", project["readme"], *project["license-files"]} <= copied
