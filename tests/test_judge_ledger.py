"""The judge's ledger: no entry can be changed, added, moved or removed unnoticed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gptworks.errors import UserError
from gptworks.judge.ledger import Ledger

KEY = b"k" * 32


def opened(path: Path, key: bytes = KEY) -> Ledger:
    return Ledger(path, key, path.with_name("entries"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ledger = opened(tmp_path / "ledger.jsonl")
    for number in range(4):
        ledger.append("ended", tried=number, gain=0.01 * number)
    return ledger.path


def test_entries_are_read_back_and_continued(path: Path) -> None:
    again = opened(path)
    assert [entry["gain"] for entry in again.entries] == [0, 0.01, 0.02, 0.03]
    again.append("finished")
    assert [entry["kind"] for entry in opened(path).entries] == ["ended"] * 4 + ["finished"]


def _swapped(lines: list[str]) -> list[str]:
    return [lines[0], lines[2], lines[1], *lines[3:]]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: [line.replace("0.02", "0.09") for line in lines], "line 3: it was changed"),
        (_swapped, "line 2: the entry before it was removed"),
        (lambda lines: [*lines[:1], *lines[2:]], "line 2: the entry before it was removed"),
        (lambda lines: lines[:-1], "line 5: the head is missing"),
        (lambda lines: lines[:3], "line 4: the head is missing"),
        (lambda lines: [*lines[:3], lines[-1]], "line 4: the head is not that of the entries above"),
        (lambda lines: [*lines, lines[-1]], "line 5: the head is not that"),
        (lambda lines: [*lines[:2], "{}", *lines[2:]], "line 3: it was changed"),
        (lambda lines: [], "line 1: the head is missing"),
        (lambda lines: ["[" * 100_000], "line 1: it was changed"),
    ],
)
def test_an_edited_ledger_is_refused_with_the_line(
    path: Path, edit: Callable[[list[str]], list[str]], message: str
) -> None:
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{line}\n" for line in edit(lines)))
    with pytest.raises(UserError, match=message):
        opened(path)


def test_an_old_copy_is_refused_and_a_crash_before_the_count_is_not(path: Path) -> None:
    old, count = path.read_text(), path.with_name("entries")
    opened(path).append("finished")
    new = path.read_text()
    path.write_text(old)
    with pytest.raises(UserError, match="line 5: it has 4 entries, and this judge wrote 5"):
        opened(path)
    path.write_text(new)
    count.write_text("4")
    assert len(opened(path).entries) == 5
    count.write_text("many")
    with pytest.raises(UserError, match="entries, the number of entries, is missing or damaged"):
        opened(path)
    count.unlink()
    with pytest.raises(UserError, match="entries, the number of entries, is missing or damaged"):
        opened(path)


def test_another_key_does_not_fit_and_lines_are_plain_json(path: Path) -> None:
    with pytest.raises(UserError, match="its signature"):
        opened(path, b"x" * 32)
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["ended"] * 4 + ["head"]
