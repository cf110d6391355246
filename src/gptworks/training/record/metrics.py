"""Writes and reads metrics.jsonl, a run's log, from which its curves, pages and model card are made; writes
samples.md."""

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

from pydantic_core import from_json

from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.files import open_regular, open_to_append, replacing, write_whole

Record = dict[str, Any]

LOG = "metrics.jsonl"

MEASURED = (
    "seconds", "tokens_per_second", "flops_per_second", "utilization", "seconds_by_part",
    "resident_bytes", "peak_allocated_bytes", "allocated_bytes",
)  # fmt: skip
"""Keys whose values depend on the machine; all other values repeat exactly when a run is repeated or resumed."""


class Writer(Protocol):
    """Receives each record that is written to the log."""

    def __init__(self, recipe: Recipe) -> None: ...
    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


class MetricsLog:
    """Writes `metrics.jsonl`: one JSON object per line. Each has a `step` and a `kind`, which is train, validation,
    sample, skipped or rollback."""

    def __init__(
        self, path: Path, resume_step: int, writers: Sequence[Writer] = (), *, resume_rollbacks: int = 0
    ) -> None:
        """Open the log and remove the records that a resumed run will write again: those after `resume_step`, and
        rollbacks beyond the first `resume_rollbacks`. Writers receive the remaining records, then each new record.
        """
        with replacing(path) as file:
            file.writelines(_line(record).encode("utf-8") for record in self._kept(path, resume_step, resume_rollbacks))
        self.path = path
        self._writers = writers
        for record in read_metrics(path) if writers else ():
            self._hand_on(record)
        self._file = open_to_append(path, inside=path.parent)

    @staticmethod
    def _kept(path: Path, resume_step: int, resume_rollbacks: int) -> Iterator[Record]:
        n_rollbacks = 0
        for record in read_metrics(path):
            if record["step"] > resume_step:
                continue
            n_rollbacks += record["kind"] == "rollback"
            if record["kind"] != "rollback" or n_rollbacks <= resume_rollbacks:
                yield record

    def write(self, record: Record) -> None:
        """Append a record to the file, and pass it to the writers."""
        self._file.write(_line(record).encode("utf-8"))
        self._file.flush()
        self._hand_on(record)

    def close(self) -> None:
        """Close the file, and the writers."""
        self._file.close()
        for writer in self._writers:
            writer.close()

    def _hand_on(self, record: Record) -> None:
        for writer in self._writers:
            writer.write(record)


class NoLog:
    """Stands in for the log on ranks other than 0: discards records."""

    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


@dataclass
class Skipped:
    """Statistics of the lines that a reader of the log skipped because they are not records."""

    reasons: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each reason, the number of skipped lines and the line number of the first."""

    def add(self, reason: str, line: int) -> None:
        count, first = self.reasons.get(reason, (0, line))
        self.reasons[reason] = (count + 1, first)

    def __bool__(self) -> bool:
        return bool(self.reasons)

    def __str__(self) -> str:
        parts = [
            f"{count:,} {reason} ({'the first is ' if count > 1 else ''}line {first:,})"
            for reason, (count, first) in self.reasons.items()
        ]
        return f"lines of metrics.jsonl that were left out: {', '.join(parts)}"


def open_log_file(path: Path) -> BufferedReader:
    """Open a run's log for reading. Raises the errors of `open_regular`, for example if the log is a link to a file
    outside the run folder."""
    return open_regular(path, inside=path.parent, max_bytes=MOST_LOG_BYTES)


def read_metrics(path: Path, skipped: Skipped | None = None, kinds: Collection[str] = ()) -> Iterator[Record]:
    """Yield the records of a log, with their keys and values checked; without a file, yield none.

    A crash may have truncated or damaged the log: lines that are not records are left out and counted in `skipped`, and
    invalid values are left out of their records. Memory holds only the records of one block of 256 KiB, and at most
    one unfinished line of up to 4 MiB.

    Args:
        kinds: yield only records of these kinds, without parsing lines that name none of them; empty for all records.
    """
    reader = MetricsReader(path, skipped, kinds)
    if path.exists():
        open_log_file(path).close()  # raises an error unless it is a regular file
    while not reader.at_end:
        for _, record in reader.read():
            if not kinds or record["kind"] in kinds:
                yield record
    reader.finish()


MOST_LOG_BYTES = 1 << 34
"""Maximum size of a log. Ten million steps need less: only a damaged or sparse file is larger."""
_MOST_LINE_BYTES = 1 << 22
_BLOCK_BYTES = 1 << 18
_KNOWN_BYTES = 256
"""Number of the last bytes read that a reader remembers. If the file now differs there, the file was rewritten."""


class MetricsReader:
    """Reads a log that may grow: each call of `read` continues where the last one stopped.

    A last line without newline is a record if it is complete JSON; otherwise the reader waits for the rest of the line.
    """

    def __init__(self, path: Path, skipped: Skipped | None = None, kinds: Collection[str] = ()) -> None:
        """
        Args:
            skipped: counts the lines that are not records; None to make a new one.
            kinds: pass over lines that name none of these kinds, without counting them; empty for all lines.
        """
        self.path, self.skipped = path, Skipped() if skipped is None else skipped
        self._names = [kind.encode() for kind in kinds]
        self.at_end = False
        """Whether the last call of `read` reached the end of the file."""
        self._offset = self._line = 0
        self._rest, self._known = b"", b""
        self._is_too_long = self._ended_open = self._was_no_line = False
        self._inode: int | None = None

    def read(self) -> list[tuple[int, Record]]:
        """Return the records of the next 256 KiB, each with the byte offset of its line; empty if there is no file."""
        if not self.path.is_file():
            self.at_end = True
            return []
        with open_log_file(self.path) as file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._offset)
            block = file.read(_BLOCK_BYTES)
        start, self._offset = self._offset - len(self._rest), self._offset + len(block)
        self._known = (self._known + block)[-_KNOWN_BYTES:]
        self.at_end = len(block) < _BLOCK_BYTES
        *lines, rest = (self._rest + block).split(b"\n")
        found = []
        for line in lines:
            if (record := self._finished(line)) is not None:
                found.append((start, record))
            start += len(line) + 1
        if len(rest) >= _MOST_LINE_BYTES:
            self._is_too_long = True
        self._rest = b"" if self._is_too_long else rest
        if self.at_end and not self._ended_open and rest.rstrip().endswith(b"}"):
            last = _parsed(rest)
            if not isinstance(last, str):
                self._rest, self._ended_open, self._line = b"", True, self._line + 1
                found.append((start, last))
        return found

    @property
    def offset(self) -> int:
        """Byte offset at which to continue: the end of the bytes read, or the start of an incomplete last line."""
        return self._offset - len(self._rest)

    def finish(self) -> None:
        """Count an incomplete last line as skipped. Call this when the log will not grow any more."""
        if self._rest or self._is_too_long:
            self._finished(self._rest)

    def continues(self) -> bool:
        """Whether the file is unchanged up to the bytes read so far. If not, a new reader must read the file."""
        if not self.path.is_file():
            return self._offset == 0
        with open_log_file(self.path) as file:
            file.seek(self._offset - len(self._known))
            same = file.read(len(self._known)) == self._known
            return same and not self._was_no_line and self._inode in (None, os.fstat(file.fileno()).st_ino)

    def _finished(self, line: bytes) -> Record | None:
        """Return the record of a complete line; None if it is no record, names none of the kinds, or `read` has already
        returned it."""
        if self._ended_open:  # `read` has returned this line's record; more text would make the line invalid
            self._ended_open = False
            self._was_no_line = self._is_too_long or bool(line.strip())
            return None
        self._line += 1
        if self._names and not any(name in line for name in self._names):
            self._is_too_long = False
            return None
        record: Record | str = "longer than 4 MiB"
        if not self._is_too_long and len(line) < _MOST_LINE_BYTES:
            record = _parsed(line)
        self._is_too_long = False
        if isinstance(record, str):
            self.skipped.add(record, self._line)
            return None
        return record


def read_record(path: Path, offset: int) -> Record | None:
    """Return the record whose line begins at a byte offset; None if no record begins there."""
    with open_log_file(path) as file:
        file.seek(offset)
        record = _parsed(file.readline(_MOST_LINE_BYTES))
    return None if isinstance(record, str) else record


_SKIM_BYTES = 1 << 13
"""Number of bytes that `skim_metrics` reads at each position; it skips longer lines."""


def skim_metrics(path: Path, n: int) -> Iterator[tuple[int, Record]]:
    """Yield at most n records, evenly spaced in the file, each with the byte offset of its line."""
    if not path.exists():
        return
    with open_log_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        for place in range(n):
            begin = file.seek(place * size // n)
            for line in file.read(_SKIM_BYTES).splitlines(keepends=True):
                if begin > place * size // n and line.endswith(b"\n") and not isinstance(record := _parsed(line), str):
                    yield begin, record
                    break
                begin += len(line)


_TAIL_BYTES = 1 << 16
"""Number of bytes at the end of a log in which `last_step` looks first."""


def last_step(path: Path) -> int:
    """Return the step of a log's last record; 0 if the last 4 MiB hold no record, or the log cannot be read."""
    try:
        with open_log_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            for n_bytes in (_TAIL_BYTES, _MOST_LINE_BYTES):
                start = file.seek(max(0, size - n_bytes))
                for line in reversed(file.read(n_bytes).split(b"\n")[start > 0 :]):
                    if not isinstance(record := _parsed(line), str):
                        return int(record["step"])
    except (OSError, UserError):
        pass
    return 0


def _parsed(line: bytes) -> Record | str:
    """Return the record of a line or, if it is not a record, the reason, such as "without a step"."""
    try:
        record = from_json(line)
    except ValueError:
        try:
            record = json.loads(line)  # accepts other encodings and lone surrogates, but takes 6 times as long
        except (ValueError, RecursionError):  # also raised for a number of more than 4,300 digits
            return "not whole JSON"
    return _fault(record) or _checked(record)


_TEXTS = ("kind", "prompt", "text", "follows", "unit")
_NOT_FINITE = ("nan", "inf", "-inf")
"""Strings that the log contains instead of numbers that JSON lacks."""


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and -(2**63) < value < 2**63)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_figure(value: Any) -> bool:
    return type(value) is float or _is_number(value) or value in _NOT_FINITE


def _is_duration(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 2**63  # false for nan and inf


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_NEEDED: dict[str, dict[str, Callable[[Any], bool]]] = {
    "train": {"tokens": _is_count, "loss": _is_figure, "seconds": _is_duration},
    "validation": {"tokens": _is_count, "loss": _is_figure},
    "sample": {"prompt": _is_text, "text": _is_text},
    "rollback": {"from_step": _is_count},
}
"""The keys that a record must have, each with a check of its value, by the record's kind."""


def _fault(record: Any) -> str | None:
    """Return the reason why a value is not a record, such as "without a step"; None if it is a record."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return "without a kind"
    if not _is_count(record.get("step")):
        return "without a step"
    for key, is_right in _NEEDED.get(record["kind"], {}).items():
        if not is_right(record.get(key)):
            return f"without {key}"
    return None


def _checked(record: Record) -> Record:
    """Return the record with its figures as numbers, without invalid values, and with None for an evaluation's missing
    perplexity and bits per byte. A record of an unknown kind stays unchanged."""
    if record["kind"] not in (*_NEEDED, "skipped"):
        return record
    for key in [key for key, value in record.items() if type(value) is not float]:  # floats, most values, are valid
        value = record[key]
        if key not in _TEXTS and _is_number(value):
            continue
        if isinstance(value, str) and key in _TEXTS:
            record[key] = value.encode("utf-8", "replace").decode("utf-8")  # replaces lone surrogates
        elif isinstance(value, str) and value in _NOT_FINITE and key not in _TEXTS:
            record[key] = float(value)
        elif key in _TEXTS or not (
            value is None
            or isinstance(value, bool)
            or (isinstance(value, dict) and all(map(_is_number, value.values())))
            or (isinstance(value, list) and all(map(_is_number, value)))
        ):
            del record[key]
    for key in MEASURED:
        if type(value := record.get(key)) is float and not math.isfinite(value):
            del record[key]
    return record if record["kind"] != "validation" else {"perplexity": None, "bits_per_byte": None, **record}


def _line(record: Record) -> str:
    plain = {k: repr(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n"


def write_samples(metrics: Path, path: Path, rule: str = "") -> None:
    """Write the run's samples, if any, as Markdown, oldest first: each prompt with its continuation. `rule` says how
    the beginnings of held-out texts were chosen."""
    samples = list(read_metrics(metrics, kinds=("sample",)))
    if not samples:
        return
    parts = [f"Held-out texts: {rule}.\n"] if rule else []
    for record in samples:
        given, made = fenced(str(record["prompt"])), fenced(str(record["text"]))
        actual = f"\nThe held-out text continues:\n\n{fenced(str(record['follows']))}\n" if "follows" in record else ""
        what = "Beginning of a held-out text" if actual else "Prompt"
        parts.append(f"## Step {record['step']:,}\n\n{what}:\n\n{given}\n\nContinuation:\n\n{made}\n{actual}")
    write_whole(path, "\n".join(["# Samples\n", *parts]))


def fenced(text: str) -> str:
    """Return the text as a Markdown code block, with a fence longer than any in the text."""
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
