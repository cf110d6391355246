"""The amount of text in the files of a folder, by file and by kind, and the reasons why files are skipped."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gptworks.errors import shortened
from gptworks.terminal import one_line
from gptworks.units import counted, readable

HIDDEN = "hidden"
"""The reason why hidden files are skipped, and also the kind of hidden files."""
_LISTED = 8


@dataclass(frozen=True, slots=True)
class Item:
    """A file of a folder, or an inner folder that is not entered: the amount of its text, or why it is skipped."""

    file: str
    """Path of the item, relative to the folder."""
    kind: str
    """Ending of the file's name, such as `.docx` or `.jsonl.gz`; `folder` for a folder; `HIDDEN` for hidden items."""
    n_bytes: int = 0
    """Bytes of the item's text in UTF-8; an estimate if only the beginning of the file was read."""
    n_documents: int | None = 0
    """Number of documents; None if only the beginning of the file was read."""
    why: str = ""
    """Reason why the item is skipped; empty if it is read."""
    notes: tuple[str, ...] = ()
    """How the file is read: its encoding, the field that is its text, or how many of its bytes were looked at."""
    lacks: str = ""
    """Text with the number of parts left out, such as broken records, and the first reason; empty if there are none."""
    is_folder: bool = False


@dataclass(frozen=True)
class Kind:
    """The items of a folder that have the same kind. All texts are printable, each on one line."""

    kind: str
    """See `Item.kind`; empty for files whose names have no ending."""
    n_read: int
    n_skipped: int
    n_bytes: int
    """Bytes of text in UTF-8."""
    notes: list[str]
    """How files are read, such as `2 read as cp1252 (guessed)`."""
    reasons: list[str]
    """Why files or parts of them are skipped: each reason with a file, such as `b.docx and 2 more: broken …`."""


def reasons(items: Iterable[Item]) -> list[str]:
    """Return a line with the reason for each item, except hidden ones, that is skipped wholly or in part."""
    return [one_line(f"{item.file}: {item.why or item.lacks}") for item in _left_out(items)]


def count_files(items: Iterable[Item]) -> int:
    """Return the number of items that are not folders."""
    return sum(not item.is_folder for item in items)


def count_left_out(items: Sequence[Item]) -> str:
    """Return as text the number of files that are skipped wholly or in part, and of folders that are not entered, such
    as `2 of 8 files and 1 folder`. Hidden items do not count as skipped."""
    left_out = _left_out(items)
    n_files = count_files(left_out)
    n_folders = len(left_out) - n_files
    return f"{n_files:,} of {count_files(items):,} files" + f" and {counted(n_folders, 'folder')}" * bool(n_folders)


def _left_out(items: Iterable[Item]) -> list[Item]:
    return [item for item in items if (item.why or item.lacks) and item.why != HIDDEN]


def table(items: Iterable[Item]) -> list[Kind]:
    """Return a `Kind` for each kind among the items. Kinds with more text come first; among kinds with equal text,
    kinds with more skipped items."""
    by_kind: dict[str, list[Item]] = {}
    for item in items:
        by_kind.setdefault(item.kind, []).append(item)
    kinds = [_kind(name, those) for name, those in by_kind.items()]
    return sorted(kinds, key=lambda kind: (-kind.n_bytes, -kind.n_skipped, kind.kind))


def _kind(name: str, items: list[Item]) -> Kind:
    notes = Counter(note for item in items for note in item.notes)
    files: dict[str, list[str]] = {}
    for item in items:
        if why := item.why or item.lacks:
            files.setdefault(why, []).append(item.file)
    named = [
        f"{those[0]}{f' and {len(those) - 1:,} more' * (len(those) > 1)}: {shortened(why, 160)}"
        for why, those in sorted(files.items(), key=lambda one: -len(one[1]))
    ]
    return Kind(
        kind=one_line(name),
        n_read=sum(not item.why for item in items),
        n_skipped=sum(bool(item.why) for item in items),
        n_bytes=sum(item.n_bytes for item in items),
        notes=[one_line(f"{count:,} {note}") for note, count in notes.most_common()],
        reasons=[*map(one_line, named)],
    )


def lines(kinds: Iterable[Kind]) -> list[str]:
    """Return the table as lines of text."""
    found = [f"{'kind':<12}{'read':>8}{'skipped':>9}  {'text':>10}"]
    for kind in kinds:
        text = readable(kind.n_bytes, "B") if kind.n_bytes else ""
        found.append(f"{kind.kind or '(no ending)':<12}{kind.n_read:>8,}{kind.n_skipped:>9,}  {text:>10}".rstrip())
        why = [*kind.notes, *kind.reasons]
        found += [f"    {line}" for line in why[:_LISTED]]
        if len(why) > _LISTED:
            found.append(f"    and {len(why) - _LISTED:,} more; `gptworks init FOLDER --look --json` lists all")
    return found
